"""Token pruners: which visual tokens are worth keeping. One idea a file; a new one is a file and an import line here."""
