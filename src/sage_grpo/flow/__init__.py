"""Import paths of version 0.1 that documents showed: the modules are in `sage_grpo.samplers`. They go with the next version."""
