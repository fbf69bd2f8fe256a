"""Models: what a family has to give (base), what it is made from (spec), how it is sampled (policy, sampling), and the families themselves."""


class ModelError(ValueError):
    """A model cannot be loaded or used as asked; the message says what to do."""
