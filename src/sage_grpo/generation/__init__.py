"""Clips of a model outside of training: made of prompts, scored, compared with those of the base, and written as public suites want them."""
