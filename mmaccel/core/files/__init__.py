"""Reads files from outside with limits on their size, and writes files atomically."""
