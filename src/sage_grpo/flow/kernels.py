"""Moved to `sage_grpo.samplers.kernels`."""

from sage_grpo.samplers.kernels import *  # noqa: F403 - forwards every public name
