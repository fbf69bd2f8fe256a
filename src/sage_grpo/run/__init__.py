"""The run: its folder, its lock, its identity, checks before the start, and the session from start to end."""
