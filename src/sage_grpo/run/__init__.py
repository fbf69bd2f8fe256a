"""The folder of a run: who owns it, what made it, and its journal."""
