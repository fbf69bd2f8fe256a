"""Rewards that come with the package."""
