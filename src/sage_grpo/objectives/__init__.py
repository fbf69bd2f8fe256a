"""Objectives: advantages, losses, trust regions and the KL coefficient."""
