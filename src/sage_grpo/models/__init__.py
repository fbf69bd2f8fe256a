"""Models: what a family has to give (base), what it is made from (spec), how it is sampled (policy, sampling), and the families themselves."""
