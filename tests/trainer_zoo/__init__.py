"""A model family from outside the package."""
