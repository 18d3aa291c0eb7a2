"""The operators, one or a few related ones per file; `operator.py` documents what an operator consists of."""
