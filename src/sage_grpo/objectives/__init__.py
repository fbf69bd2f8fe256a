"""Objectives: advantages, losses, trust regions and the KL coefficient; `build` makes the one that a configuration names."""
