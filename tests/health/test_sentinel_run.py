"""What a run does about findings: told, slowed, taken back, stopped; continued to the bit; and always to an end."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

import sage_grpo.health.sentinel as sentinel_module
import trainer_toys
from sage_grpo.callbacks.journal import read_events
from sage_grpo.data.groups import Member
from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.fsdp import Engine
from sage_grpo.distributed.world import World
from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.statistics import ParameterDrift, appearance, describe, thumbnails
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import run
from sage_grpo.training.config import EvalConfig, KeepConfig, OptimizerConfig, TrainConfig, UpdateConfig
from sage_grpo.training.events import Hooks, SentinelEvent
from sage_grpo.training.loss import Diverged
from sage_grpo.training.optim import AdaptiveRate
from sage_grpo.training.trainer import Trainer
from trainer_helpers import assert_same_run, interrupt, rows, same, weights_of

QUICK = {"patience": 1, "window": 5}


@pytest.fixture
def far(make_config, monkeypatch: pytest.MonkeyPatch):
    """A run whose only sign is that the weights went further than `limit`; how far they are is the same on every machine and resume."""

    def make(action: str, *, limit: float = 0.015, iterations: int = 8, **options) -> TrainConfig:
        def too_far(row, past) -> str:
            return f"at {row['weights/distance']:.4f}" if row["weights/distance"] > limit else ""

        monkeypatch.setattr(sentinel_module, "SIGNS", {"too_far": too_far})
        return make_config(
            iterations=iterations,
            rollout={"steps": 3},
            sentinel=SentinelConfig(action=action, **{**QUICK, **options}),
            optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0),
            evaluate=EvalConfig(every=1, prompts=2, steps=1, show=0),
            keep=KeepConfig(checkpoint_every=3, checkpoints=1, videos_every=0),
        )

    return make


def told(config: TrainConfig) -> list[tuple[int, str]]:
    return [
        (event["iteration"], event["text"]) for event in read_events(Path(config.out)) if event["kind"] == "sentinel"
    ]


def lrs(config: TrainConfig) -> list[float]:
    return [row["optimizer/lr"] for row in rows(config) if "optimizer/lr" in row]


def test_a_finding_is_told_in_the_terminal_the_diary_an_event_and_a_metric(make_config, capsys) -> None:
    trainer_toys.CALLS["count"] = 0
    config = make_config(
        iterations=12,
        rollout={"steps": 2},
        update=UpdateConfig(updates_per_rollout=1),
        rewards=[RewardSpec(name="trainer_toys:fades", batch_size=0, try_out=False)],
        evaluate=EvalConfig(every=0, prompts=2, steps=2),
    )
    events: list[SentinelEvent] = []
    run(config, hooks=Hooks(sentinel=events.append))
    assert (events[0].iteration, events[0].name, events[0].action) == (10, "spread_vanished", "warn")
    assert told(config)[0][0] == 10
    assert told(config)[0][1].startswith("spread_vanished: reward/group_std is 0")
    assert "sentinel: spread_vanished" in capsys.readouterr().out
    flags = [row["sentinel/open"] for row in rows(config) if "reward/total" in row]
    assert flags == [0.0] * 9 + [1.0] * 3
    assert len(flags) == 12


@pytest.mark.parametrize("first", [3, 1, 4])
def test_a_run_that_ends_in_doubt_says_so_and_where_better_weights_are(far, monkeypatch, capsys, first: int) -> None:
    config = far("warn", iterations=3)
    totals, iterations = count(), count(1)
    evaluate = Trainer.evaluate

    def rising(self: Trainer, after_batch):
        found = evaluate(self, after_batch)
        return replace(found, metrics={**found.metrics, "eval/total": float(next(totals))})

    monkeypatch.setattr(Trainer, "evaluate", rising)
    monkeypatch.setattr(sentinel_module, "SIGNS", {"late": lambda row, past: "late" * (next(iterations) >= first)})
    run(config)
    (text,) = [event["text"] for event in read_events(Path(config.out)) if event["kind"] == "finish"]
    begin = "The sentinel warned about the final weights (late): "
    advice = {3: "best/ has those after iteration 2.", 1: "look at their clips before you use them."}
    assert text == (begin + advice[first] if first in advice else "")
    assert (" ".join(begin.split()) in " ".join(capsys.readouterr().out.split())) == bool(text)


@pytest.mark.slow
def test_the_step_size_is_lowered_by_a_factor_that_is_saved(far, tmp_path: Path) -> None:
    config = far("lower_lr", lr_factor=0.25)
    whole = replace(config, out=str(tmp_path / "whole"))
    run(whole)
    first = next(n for n, row in enumerate(r for r in rows(whole) if "reward/total" in r) if row["sentinel/open"])
    assert lrs(whole)[: first + 2] == [1e-3] * (first + 2)  # told after one iteration, acted on after the next
    assert lrs(whole)[first + 2] == pytest.approx(2.5e-4)
    assert "lower" not in told(whole)[0][1]
    assert "0.25 times as long" in told(whole)[1][1]
    broken = replace(config, out=str(tmp_path / "broken"))
    interrupt(broken, at=2 * (first + 3) + 2)
    run(broken)
    assert_same_run(whole, broken)


@pytest.mark.slow
def test_a_run_goes_back_to_the_recorded_checkpoint_and_ends(far, tmp_path: Path) -> None:
    config = far("rollback", iterations=20, rollbacks=2)
    whole = replace(config, out=str(tmp_path / "whole"))
    ended = run(whole)
    backs = [(at, text) for at, text in told(whole) if "back to the weights" in text]
    assert len(backs) == 3  # the third time it ends there
    assert "steps 0.5 times" in backs[0][1]
    assert "steps 0.25 times" in backs[1][1]
    assert "steps 0.25 times" in backs[2][1]
    assert ended.stopped
    assert "rolled back 2 times before" in told(whole)[-1][1]
    distances = {row["iteration"]: row["weights/distance"] for row in rows(whole) if "weights/distance" in row}
    good = int(backs[0][1].split("iteration ")[1].split(" ")[0])
    at = backs[0][0]
    assert good < at - 1  # neither of the two iterations in which the sign was there
    assert distances[good] <= 0.015
    assert distances[at + 1] < distances[at]  # it continues from there, with the iteration that follows
    broken = replace(config, out=str(tmp_path / "broken"))
    interrupt(broken, at=2 * (at + 1) + 2)
    run(broken)
    assert rows(whole) == rows(broken)


def test_the_weights_after_a_rollback_are_those_of_the_checkpoint(make_config, make_trainer, tmp_path: Path) -> None:
    config = make_config(optimizer=OptimizerConfig(lr=1e-2, ema=0.9, target_kl=0.1), iterations=4)
    trainer, twin = make_trainer(config), make_trainer(config)
    for _ in range(2):
        trainer.step()
    folder = trainer.save(tmp_path)
    then = {name: tensor.clone() for name, tensor in trainer.state._tensors().items()}
    trainer.step()
    state = trainer.state
    state.sentinel.brake, position, updates = 0.5, state.stream.position, state.updates
    factor = checkpoint.read_meta(folder)["pace"]["factor"]
    state.go_back(folder, trainer.world)
    assert same({name: t.clone() for name, t in state._tensors().items()}, then)
    assert (state.iteration, state.stream.position, state.updates) == (3, position, updates)
    assert state.optimizer.pace.factor == pytest.approx(0.5 * factor)
    assert not same(weights_of(trainer), weights_of(twin))
    trainer.step()


def test_a_stop_saves_and_says_why(far, capsys: pytest.CaptureFixture[str]) -> None:
    config = far("stop")
    ended = run(config)
    assert ended.stopped
    assert 0 < ended.iteration < 8
    assert (Path(config.out) / "checkpoints" / f"{ended.iteration:06d}").is_dir()
    assert "Stopped by the sentinel" in capsys.readouterr().out
    assert told(config)[0][1].startswith("too_far: at ")  # told first


def test_the_good_checkpoint_outlives_the_others(far) -> None:
    config = far("rollback", iterations=8, patience=9)  # never acted on, but no weights are good after the sign
    run(config)
    kept = sorted(folder.name for folder in (Path(config.out) / "checkpoints").iterdir())
    bad = next(row["iteration"] for row in rows(config) if row.get("weights/distance", 0.0) > 0.015)
    assert len(kept) == 2
    assert int(kept[0]) < bad
    assert kept[1] == "000008"


@pytest.mark.slow
def test_a_run_that_diverges_goes_back_too(far, monkeypatch: pytest.MonkeyPatch) -> None:
    config = far("rollback", limit=1e9, rollbacks=1)
    clip, calls = Engine.clip_gradients, []

    def infinite(self, params, most) -> float:
        calls.append(1)
        return float("nan") if len(calls) == 9 else clip(self, params, most)  # two updates an iteration: in the fifth

    monkeypatch.setattr(Engine, "clip_gradients", infinite)
    ended = run(config)
    assert (ended.iteration, ended.stopped) == (8, False)
    (back,) = [text for at, text in told(config) if at == 4]
    assert "not_finite" in back
    assert "iteration 4" in back
    monkeypatch.setattr(Engine, "clip_gradients", lambda *a: float("nan"))
    with pytest.raises(Diverged):  # it would go on forever
        run(replace(config, out=config.out + "-again"))


# ---- what is measured for the sentinel


def test_a_target_kl_follows_the_brake() -> None:
    free, slow = AdaptiveRate(0.1), AdaptiveRate(0.1)
    slow.slow_to(0.5)
    assert slow.factor == 0.5
    for _ in range(50):
        free.observe(0.1 * (free.factor / 0.8) ** 2)
        slow.observe(0.1 * (slow.factor / 0.8) ** 2)
    assert free.factor == pytest.approx(0.8, rel=1e-3)
    assert slow.factor == pytest.approx(0.4, rel=1e-3)  # half of the step, so a quarter of the KL
    again = AdaptiveRate(0.1)
    again.load_state_dict(slow.state_dict())
    assert again.observe(0.03) == slow.observe(0.03)


def test_looks_tell_clips_apart_and_know_their_groups() -> None:
    clip = torch.zeros(4, 5, 16, 24, 3, dtype=torch.uint8)
    clip[0, ..., 0] = 255  # red
    clip[1, 2:] = 255  # turns white
    small = thumbnails(clip)
    assert small.shape == (4, 4, 3, 8, 8)
    seen = describe(small.double(), torch.tensor([0, 0, 1, 1]))
    assert seen["video/saturation"] == pytest.approx(0.25)
    assert seen["video/motion"] == pytest.approx((1 / 3) / 4)
    assert seen["video/brightness"] == pytest.approx((1 / 3 + 0.5) / 4)
    apart = describe(small.double(), torch.tensor([0, 1, 2, 3]))
    assert apart["video/spread"] == 0.0 < seen["video/spread"]
    assert describe(small[2:].double(), torch.tensor([0, 0]))["video/spread"] == 0.0
    pair = torch.tensor([0.25, 0.75], dtype=torch.float64).view(2, 1, 1, 1, 1).expand(2, 4, 3, 8, 8)
    assert describe(pair, torch.tensor([5, 5]))["video/spread"] == 0.25, "a standard deviation"
    assert describe(pair.transpose(0, 4), torch.zeros(8))["video/contrast"] == 0.25, "across a frame"


def test_looks_do_not_depend_on_which_process_has_a_clip(monkeypatch) -> None:
    clips = torch.randint(0, 256, (5, 3, 8, 8, 3), dtype=torch.uint8)
    members = [Member(0, 0), Member(0, 1), Member(0, 2), Member(1, 0), Member(1, 2)]
    order = [2, 0, 3, 4, 1]
    small = thumbnails(clips)
    seen = appearance(small, members, World())
    assert seen == appearance(small[order], [members[n] for n in order], World())
    assert seen == pytest.approx(describe(small.double(), torch.tensor([0, 0, 0, 1, 1])))
    monkeypatch.setattr("sage_grpo.health.statistics.describe", lambda rows, groups: (rows, groups.tolist()))
    rows, groups = appearance(small[order], [members[n] for n in order], World())
    assert torch.equal(rows, small.double()), "in the order of groups and their members: sums are the same to the bit"
    assert groups == [0, 0, 0, 1, 1]


def test_travel_is_the_relative_distance_and_the_share_that_moved() -> None:
    p = torch.nn.Parameter(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    travel = ParameterDrift({"p": p})
    assert travel.measure(World()) == {"weights/distance": 0.0, "weights/moved": 0.0}
    with torch.no_grad():
        p[2] = 1.0
    assert travel.measure(World()) == {"weights/distance": pytest.approx(0.2), "weights/moved": 0.25}
