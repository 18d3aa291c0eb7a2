"""Video streams: the session that watches and answers, what runs it, and its files."""
