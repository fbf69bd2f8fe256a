"""Health: checks of a run's metrics for signs of failure, and the findings that follow."""
