"""Experiments over many runs: arms x seeds -> one file of rows -> tables, figures and a report. docs/compare.md is the guide."""
