"""Saved videos stay within their disk budget; the newest are kept."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sage_grpo.telling.observers import Samples

STRANGERS = ("favourite.mp4", "rollout-notes.txt", "heldout-000001-00.mp4.bak", "rollout-12-00.mp4")


def put(folder: Path, name: str, second: int) -> None:
    (folder / name).write_bytes(bytes(1000))
    os.utime(folder / name, ns=(second * 10**9, second * 10**9))


def test_rollouts_go_before_held_out_clips_and_those_before_training_last(tmp_path: Path) -> None:
    """The oldest first; files of other people stay and do not count."""
    own = ["heldout-000000-00.mp4", "heldout-000001-00.mp4", "rollout-000002-00.mp4", "rollout-000001.txt"]
    own.append("heldout-000002.txt")
    for name in STRANGERS:
        put(tmp_path, name, 0)
    for second, name in enumerate(own, 1):
        put(tmp_path, name, second)
    samples = Samples(tmp_path, megabytes=0.005)
    for count, gone in ((5, None), (4, own[2]), (3, own[3]), (2.5, own[1]), (1, own[4]), (0, own[0])):
        samples.budget = 1000 * count
        samples.prune()
        own = [name for name in own if name != gone]
        assert {file.name for file in tmp_path.iterdir()} == {*own, *STRANGERS}


def test_a_budget_holds_while_clips_are_saved(tmp_path: Path) -> None:
    for budget, kept in ((1.0, {"heldout-000001-00.mp4", "heldout-000001.txt"}), (0.0, set())):
        clips = torch.zeros(1, 2, 16, 16, 3, dtype=torch.uint8)
        Samples(tmp_path, megabytes=budget).save("heldout-000001", clips, ["a"], 8.0)
        assert {file.name for file in tmp_path.iterdir()} == kept
