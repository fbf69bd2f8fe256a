"""SAGE-GRPO: reinforcement-learning post-training of flow-matching video generators."""

__version__ = "0.1.0"
