"""Research beside the package, and not in its wheel: a second world, the making of the worlds' models, and what was measured."""
