"""Generation: clips of a model outside of training, their scores, and comparisons with the base."""
