"""Rewards over HTTP: the server, its client, and their wire format."""
