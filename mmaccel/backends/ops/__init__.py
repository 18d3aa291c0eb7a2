"""The operators: a file for one, or for a few of one kind; `operator.py` says what each is made of."""
