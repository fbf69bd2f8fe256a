"""Frames that nobody looks at are not decoded: every figure of a run stays the same, and what is shown is whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sage_grpo import session
from sage_grpo.crew import studio
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.sentinel.figures import frames_seen
from sage_grpo.telling import observers
from sage_grpo.telling.events import Hooks
from sage_grpo.training import trainer as trainers
from sage_grpo.training.config import BatchConfig, EvalConfig, KeepConfig
from trainer_helpers import assert_same_run

FRAMES = 9


def reds(frames: Tensor, prompts: list[str]) -> Tensor:
    """A reward of single frames."""
    return frames[..., 0].float().mean(dim=(1, 2))


SAMPLED = RewardSpec(name="test_sparse_clips:reds", options={"per_frame": True, "sample_fps": 2.0}, batch_size=0)


@pytest.fixture
def small(make_config):
    """A run of a tiny model whose decoder works in chunks, with a reward that reads two frames of nine."""
    return make_config(
        kind="wan_t2v",
        model={"frames": FRAMES, "fps": 8.0},
        iterations=2,
        rewards=[SAMPLED],
        batch=BatchConfig(prompts=1, group_size=2, micro_batch=1),
        rollout={"steps": 3},
        evaluate=EvalConfig(every=0, prompts=1, steps=1, show=1),
        keep=KeepConfig(checkpoint_every=9, videos_every=2, videos=1),
    )


@pytest.mark.slow
def test_a_run_has_the_same_figures_and_weights_and_shows_whole_clips(small, tmp_path, monkeypatch) -> None:
    """The second iteration is saved as videos; the first is for the reward alone."""
    seen: list[Tensor] = []
    step, save = trainers.Trainer.step, observers.Samples.save
    monkeypatch.setattr(trainers.Trainer, "step", lambda self: (step(self), seen.append(self.videos))[0])
    saved: list[Tensor] = []

    def keep(self, name, clips, *rest):
        if name.startswith("rollout"):
            saved.append(clips.clone())
        return save(self, name, clips, *rest)

    monkeypatch.setattr(observers.Samples, "save", keep)
    sparse, whole = (replace(small, out=str(tmp_path / name)) for name in ("sparse", "whole"))
    session.run(sparse, quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(studio, "frames_needed", lambda model, reward: None)
        session.run(whole, quiet=True)
    assert_same_run(sparse, whole)
    made = [[int(clip.any()) for clip in videos[0]] for videos in seen]
    looked_at = sorted({2, 6, *frames_seen(FRAMES)})  # the centres of two slices, and what the sentinel looks at
    assert [index for index, there in enumerate(made[0]) if there] == looked_at
    assert all(all(row) for row in made[1:])
    assert torch.equal(seen[0][:, looked_at], seen[2][:, looked_at])
    assert len(saved) == 2
    assert torch.equal(*saved)


def test_a_program_that_is_told_of_iterations_gets_whole_clips(small) -> None:
    got: list[Tensor] = []
    quiet = replace(small, iterations=1, keep=replace(small.keep, videos_every=0))
    session.run(quiet, hooks=Hooks(iteration=lambda event: got.append(event.videos)), quiet=True)
    assert all(bool(frame.any()) for frame in got[0].flatten(0, 1))
