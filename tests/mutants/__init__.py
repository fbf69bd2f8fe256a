"""Errors planted on purpose, to see whether the tests notice. `make mutants` runs them; see plant.py."""
