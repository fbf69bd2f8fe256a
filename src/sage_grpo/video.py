"""Moved to `sage_grpo.utils.video`."""

from sage_grpo.utils.video import *  # noqa: F403 - forwards every public name
