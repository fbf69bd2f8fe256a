"""The mathematics of sampling."""
