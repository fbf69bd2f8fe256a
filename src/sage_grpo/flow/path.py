"""Moved to `sage_grpo.samplers.path`."""

from sage_grpo.samplers.path import *  # noqa: F403 - forwards every public name
