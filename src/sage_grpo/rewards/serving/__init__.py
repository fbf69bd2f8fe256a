"""Rewards in another process: the server, what calls it, and what travels between them."""
