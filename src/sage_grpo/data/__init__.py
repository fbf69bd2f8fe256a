"""Prompts, and the assignment of group members to ranks."""
