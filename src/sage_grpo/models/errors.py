"""The error of everything that loads and runs models."""


class ModelError(ValueError):
    """A model cannot be loaded or used as asked; the message says what to do."""
