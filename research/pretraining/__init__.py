"""The making of the worlds' models, from scratch on rendered clips: `python -m research.pretraining.shapes` and `.scenes`."""
