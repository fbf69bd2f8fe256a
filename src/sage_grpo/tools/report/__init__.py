"""Pictures of runs, for people."""
