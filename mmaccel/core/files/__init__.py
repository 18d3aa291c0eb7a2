"""Files that are read with limits and written whole."""
