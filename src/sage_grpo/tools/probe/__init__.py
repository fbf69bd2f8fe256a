"""Steps and strength of exploration, measured on the user's own model and reward before a run."""
