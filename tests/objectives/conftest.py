"""Trainers on tiny checkpoints: see tests/trainers.py."""

from trainers import _one_model_per_spec, in_double, make_config, make_trainer, prompts  # noqa: F401 - fixtures
