"""The check-up of `sage-grpo doctor`: every check is a small function that returns a Finding; `examine.py` lists them in order."""
