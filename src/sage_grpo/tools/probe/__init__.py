"""Where and how much to explore, measured on the user's own model and reward before a run."""
