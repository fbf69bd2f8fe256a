"""Prompts, and which rank holds which member of which group."""
