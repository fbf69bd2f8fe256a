"""The mathematics of learning."""
