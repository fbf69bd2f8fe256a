"""Observers of a run: metrics and loggers, the terminal, events for programs, and videos."""
