"""One file for every family of models."""
