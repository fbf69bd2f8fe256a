"""Saved videos stay within their disk budget; the newest are kept."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sage_grpo.telling.observers import Samples


def clips(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 4, 32, 32, 3), generator=generator, dtype=torch.uint8)


def used(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_the_oldest_go_first_and_the_budget_holds(tmp_path: Path) -> None:
    free = Samples(tmp_path / "free", megabytes=100)
    free.save("rollout-000000", clips(2, 0), ["a", "b"], 8.0)
    one = used(tmp_path / "free")
    assert sorted(f.name for f in (tmp_path / "free").iterdir()) == [
        "rollout-000000-00.mp4", "rollout-000000-01.mp4", "rollout-000000.txt",
    ]  # fmt: skip
    samples = Samples(tmp_path / "tight", megabytes=2.6 * one / 1e6)
    for number in range(6):
        samples.save(f"rollout-{number:06d}", clips(2, number), ["a", "b"], 8.0)
        for file in (tmp_path / "tight").glob(f"*{number:06d}*"):
            os.utime(file, ns=(number * 10**9, number * 10**9))  # apart in time, whatever the clock's grain
        assert used(tmp_path / "tight") <= samples.budget
    kept = {file.name[:14] for file in (tmp_path / "tight").iterdir()}
    assert "rollout-000005" in kept
    assert "rollout-000004" in kept
    assert not kept & {"rollout-000000", "rollout-000001", "rollout-000002"}


def test_a_budget_below_one_clip_keeps_nothing_and_does_not_fail(tmp_path: Path) -> None:
    samples = Samples(tmp_path, megabytes=0.0)
    samples.save("rollout-000001", clips(1, 0), ["a"], 8.0)
    assert used(tmp_path) == 0


def test_files_of_other_people_stay_and_do_not_count(tmp_path: Path) -> None:
    for name in ("favourite.mp4", "rollout-notes.txt", "heldout-000001-00.mp4.bak", "rollout-12-00.mp4"):
        (tmp_path / name).write_bytes(bytes(2000))
        os.utime(tmp_path / name, ns=(0, 0))  # older than anything of the run
    (tmp_path / "rollout-000000.txt").mkdir()
    before = {file.name for file in tmp_path.iterdir()}
    samples = Samples(tmp_path, megabytes=0.0)
    samples.save("rollout-000001", clips(1, 0), ["a"], 8.0)
    samples.budget = 1e6
    samples.save("heldout-000002", clips(1, 1), ["b"], 8.0)
    assert {file.name for file in tmp_path.iterdir()} == before | {"heldout-000002-00.mp4", "heldout-000002.txt"}


def test_rollouts_go_before_held_out_clips_and_those_before_training_last(tmp_path: Path) -> None:
    samples = Samples(tmp_path, megabytes=100)
    names = ["heldout-000000", "heldout-000001", "rollout-000002", "heldout-000002"]
    rows = [{"prompt": "a", "noise": "1", "scores": {"total": 0.5}, "clip": 0}]
    for number, name in enumerate(names):
        samples.save(name, clips(1, number), ["a\nb"], 8.0, rows if name.startswith("heldout") else ())
        for file in tmp_path.glob(f"{name}*"):
            os.utime(file, ns=(number * 10**9, number * 10**9))
    assert (tmp_path / "heldout-000000.txt").read_text() == "a b\n"
    one = used(tmp_path) / len(names)
    for count, kept in (
        (3, {"heldout-000000", "heldout-000001", "heldout-000002"}),
        (2.2, {"heldout-000000", "heldout-000002"}),
    ):
        samples.budget = (count + 0.1) * one
        samples.prune()
        assert {file.name[:14] for file in tmp_path.glob("*.mp4")} == kept
