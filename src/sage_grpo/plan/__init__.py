"""Cost planning before weights are loaded: network passes, memory, seconds, and changes that make a run fit."""
