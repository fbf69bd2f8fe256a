"""Rewards: anything that turns clips and prompts into named scores.

The heavy libraries are imported only when a reward is loaded, so that configurations import quickly.
"""
