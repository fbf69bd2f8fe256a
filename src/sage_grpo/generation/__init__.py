"""Generation: clips of a model outside of training, their scores, comparisons with the base, and the layouts of public
suites."""
