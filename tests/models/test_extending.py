"""A new family needs one module with `load`, and nothing else has to know of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sage_grpo.cli import main
from sage_grpo.models.spec import ModelSpec

HERE = Path(__file__).parent
RISING = """
from itertools import count

calls = count()


def later_is_better(videos, prompts, fps):
    return videos.float().mean((1, 2, 3, 4)) + 10 * next(calls)
"""
"""A reward whose every evaluation is the best so far."""


@pytest.mark.slow
def test_it_trains_keeps_its_best_and_is_exported(monkeypatch, tmp_path: Path) -> None:
    """As a file of the current folder, named without a dot; what a run leaves is loaded as any checkpoint is."""
    (tmp_path / "toy_in_one_file.py").write_text((HERE / "toy_family.py").read_text())
    (tmp_path / "rising.py").write_text(RISING)
    (tmp_path / "prompts.txt").write_text("a cat\na dog and a cat\n")
    monkeypatch.chdir(tmp_path)
    arguments = [
        "train", "--model.family", "toy_in_one_file", "--rewards", '[{"name": "rising:later_is_better"}]', "--data.prompts", "prompts.txt",
        "--data.eval_prompts", "prompts.txt", "--evaluate.every", "1", "--iterations", "1", "--rollout.steps", "3", "--batch.prompts", "2",
        "--batch.group_size", "4", "--keep.videos_every", "0", "--log.tensorboard", "false", "--out", "run",
    ]  # fmt: skip
    assert main(arguments) == 0
    assert main(["export", "--run", "run", "--out", "exported", "--trust_run", "true"]) == 0
    trained = ModelSpec(family="toy_in_one_file", path="run/final").load().trainable()
    exported = ModelSpec(family="toy_in_one_file", path="exported").load().trainable()
    fresh = ModelSpec(family="toy_in_one_file").load().trainable()
    assert (tmp_path / "run" / "best" / "toy.safetensors").is_file()
    assert all(
        torch.equal(exported[name], trained[name]) and not torch.equal(fresh[name], trained[name]) for name in fresh
    )
