"""Families of models, one file each."""
