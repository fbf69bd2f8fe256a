"""Observers of a run on as much of a trainer as they ask: best weights, checkpoints, the profile, and the table at its start."""

from __future__ import annotations

import errno
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from sage_grpo.folder.journal import Journal, read_events
from sage_grpo.models.spec import LoraSpec
from sage_grpo.parallel import checkpoint
from sage_grpo.recipes import recipe
from sage_grpo.telling import clock, observers
from sage_grpo.telling.clock import Clock, Kernel, Recorded, Recorder
from sage_grpo.telling.events import CheckpointEvent, Hooks, IterationEvent, SentinelEvent
from sage_grpo.telling.metrics import Metrics, animation, run_id
from sage_grpo.telling.observers import Best, Callbacks, Checkpoints, Profile, Rows, Samples, Videos
from sage_grpo.telling.terminal import Terminal, iteration_line, plan_table
from sage_grpo.types import Sound
from sage_grpo.video import read_sound


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """As much of a trainer as observers ask."""
    keep = SimpleNamespace(checkpoint_every=3, checkpoints=2, videos_every=2, videos=1)
    return SimpleNamespace(
        config=SimpleNamespace(out=str(tmp_path), keep=keep, iterations=5, profile=4), clock=Clock(), failures="",
        state=SimpleNamespace(iteration=4, best={}, sentinel=SimpleNamespace(doubts=[], good=7)), captions=["a"],
        world=SimpleNamespace(is_main=True, from_main=lambda text: text, barrier=lambda: None, any=bool), sound=None,
        writer=SimpleNamespace(background=True, finish=lambda: None), videos=torch.zeros(1, 2, 16, 16, 3, dtype=torch.uint8),
    )  # fmt: skip


class Said:
    """A terminal that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str | None]] = []

    def say(self, text: str, *, style: str | None = None) -> None:
        self.lines.append((text, style))


def found(total: float) -> Any:
    return SimpleNamespace(result=SimpleNamespace(metrics={"eval/total": total}), best=False)


def test_the_best_weights_are_of_the_highest_total_that_nobody_doubts(trainer: Any, tmp_path: Path) -> None:
    said, exported = Said(), []
    trainer.export = lambda folder: exported.append((folder, trainer.state.iteration))
    best = Best(trainer, said, tmp_path / "best")  # type: ignore[arg-type]
    for number, total, doubts, now in (
        (0, 1.0, [], 0), (1, math.nan, [], 0), (2, 1.0, [], 0), (3, 1.5, [], 3), (4, 2.0, ["hacking", "drift"], 3), (5, 1.75, [], 5),
    ):  # fmt: skip
        trainer.state.iteration, trainer.state.sentinel.doubts = number, doubts
        row = found(total)
        best.evaluated(row)
        assert trainer.state.best["iteration"] == now
        assert row.best == (now == number)
    assert trainer.state.best == {"iteration": 5, "score": 1.75}
    assert exported == [(tmp_path / "best", 3), (tmp_path / "best", 5)]
    ((text, style),) = said.lines
    assert text.startswith("The held-out total of 2 after iteration 4 is the highest so far, but best/ is not taken")
    assert style == "yellow"
    assert "(hacking, drift)" in text
    assert [(event["kind"], event["iteration"]) for event in read_events(tmp_path)] == [("best", 4)]

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    trainer.export, waited = full, []
    trainer.world.barrier = lambda: waited.append(1)
    best.evaluated(found(9.0))
    assert (trainer.state.best["iteration"], waited) == (5, [1])
    assert "could not be written (OSError: [Errno 28] No space left). The run goes on." in said.lines[-1][0]
    assert said.lines[-1][1] == "yellow"


def test_checkpoints_are_due_on_the_beat_at_the_end_and_at_a_stop(trainer: Any, tmp_path: Path, monkeypatch) -> None:
    pruned, saved = [], []
    monkeypatch.setattr(checkpoint, "prune", lambda *words, **named: pruned.append((words, named)))
    trainer.save = lambda *words: saved.append(words) or tmp_path / "000004"
    journal = Journal(tmp_path / "m.jsonl")
    journal.write(1, {"a": 1.0})
    saver = Checkpoints(trainer, tmp_path, {"code": "x"}, Metrics((), journal))
    assert [saver.due(n, last=False, stopping=False) for n in (1, 2, 3, 4, 6)] == [False, False, True, False, True]
    assert saver.due(1, last=True, stopping=False)
    assert saver.due(1, last=False, stopping=True)
    assert saver.save(needed=False) == tmp_path / "000004"
    assert saved == [(tmp_path, {"identity": {"code": "x"}}, {"metrics.jsonl": (tmp_path / "m.jsonl").read_bytes()})]
    trainer.world.is_main = False
    saver.prune()
    assert pruned == [((tmp_path, 2, 4), {"spare": 7})]
    assert Metrics().rows == b""


def test_a_program_hears_of_checkpoints_and_of_the_sentinel(trainer: Any, tmp_path: Path) -> None:
    heard: list[Any] = []
    hooks = Hooks(iteration=heard.append, checkpoint=heard.append, sentinel=heard.append)
    callbacks, event = Callbacks(trainer, hooks, None), SentinelEvent(4, "drift", "it drifts", "warn")  # type: ignore[arg-type]
    callbacks.after({"a": 1.0})
    callbacks.saved(tmp_path / "000004")
    callbacks.told(event)
    assert heard[1:] == [CheckpointEvent(4, tmp_path / "000004", complete=False), event]
    assert (heard[0].iteration, heard[0].metrics, heard[0].prompts) == (4, {"a": 1.0}, ["a"])
    assert heard[0].videos is trainer.videos
    assert isinstance(heard[0], IterationEvent)
    assert callbacks.shows(1)
    assert not Callbacks(trainer, Hooks(), None).shows(1)  # type: ignore[arg-type]
    said = Said()
    rows = Rows(trainer, Metrics(), said)  # type: ignore[arg-type]
    rows.told(event)
    rows.told(replace(event, action="stop"))
    assert said.lines == [("sentinel: drift: it drifts", "yellow"), ("sentinel: it drifts", "yellow")]
    assert [one["text"] for one in read_events(tmp_path)] == ["drift: it drifts", "it drifts"]


def test_the_iteration_that_profile_names_is_recorded_and_told(trainer: Any, tmp_path: Path, monkeypatch) -> None:
    said = Said()
    profile = Profile(trainer, said, tmp_path / "profile")  # type: ignore[arg-type]
    for number, main in ((3, True), (4, False)):
        trainer.world.is_main = main
        with profile.during(number):
            assert trainer.clock.recorder is None
    trainer.world.is_main = True
    profile.after({})
    with profile.during(4):
        assert isinstance(trainer.clock.recorder, Recorder)
        assert trainer.clock.recorder.folder == tmp_path / "profile"
    assert trainer.clock.recorder is None
    monkeypatch.setattr(Recorder, "write_table", lambda self, number, row: f"from {number}: {row}")
    trainer.state.iteration = 5
    profile.after({"a": 1.0})
    profile.after({"a": 2.0})
    assert [text.partition(" (open")[0] for text, _ in said.lines] == [
        "from 4: {'a': 1.0}", f"Profile of iteration 5: {tmp_path / 'profile'}",
    ]  # fmt: skip


def test_a_profiles_table_is_of_whole_phases_and_of_their_longest_kernels(monkeypatch) -> None:
    monkeypatch.setattr(clock, "TOP", 1)
    kernels = (Kernel("matmul", 1.5, 30), Kernel("add", 0.5, 10))
    parts = [Recorded("rollout", 4.0, 8, kernels), Recorded("update", 1.0, 0, ()), Recorded("none", 0.0, 0, ())]
    assert clock.table(parts, 7, {"time/rollout": 6.0, "time/update": 2.0}).splitlines() == [
        "Iteration 7 to 8, recording included. A phase's first 8 passes are recorded; kernels are of that part.",
        "",
        "phase        seconds   share  recorded  passes   busy  launches",
        "rollout        6.000     75%     4.000       8    50%        40",
        "update         2.000     25%     1.000       0     0%         0",
        "none           0.000      0%     0.000       0     0%         0",
        "",
        "rollout: share of its kernels' time, seconds, calls",
        " 75.0%    1.5000      30  matmul",
        "",
        "update: share of its kernels' time, seconds, calls",
        "",
        "none: share of its kernels' time, seconds, calls",
    ]


def test_clips_are_saved_with_their_scores_and_their_sound(trainer: Any, tmp_path: Path) -> None:
    clips, sound = (
        torch.zeros(2, 3, 16, 32, 3, dtype=torch.uint8),
        Sound(torch.ones(2, 1, 8000) * torch.tensor([0.5, -0.5])[:, None, None], 16000),
    )
    rows = [{"prompt": "a", "scores": {}, "clip": 1}, {"prompt": "b", "scores": {}, "clip": None}]
    files = Samples(tmp_path, megabytes=9).save("heldout-000001", clips, ["a\n b", "c"], 8.0, rows, sound)
    assert [file.name for file in files] == ["heldout-000001-00.mp4", "heldout-000001-01.mp4"]
    assert (tmp_path / "heldout-000001.txt").read_text() == "a b\nc\n"
    named = [{**rows[0], "clip": files[1].name}, rows[1]]
    found = json.loads((tmp_path / "heldout-000001.json").read_text())
    assert found == {"fps": 8.0, "frames": 3, "height": 16, "width": 32, "rows": named, "sound": True}
    heard = [read_sound(file) for file in files]
    assert [round(float(one.waves[:, 3000:5000].mean()), 1) for one in heard if one] == [0.5, -0.5]
    trainer.model = SimpleNamespace(video=SimpleNamespace(fps=8.0))
    trainer.sound, saved = sound, []
    samples: Any = SimpleNamespace(folder=tmp_path, save=lambda *words: saved.append(words) or [])
    Videos(trainer, samples, None).after({})  # type: ignore[arg-type]
    assert (saved[0][0], saved[0][2:5]) == ("rollout-000004", (["a"], 8.0, ()))
    assert saved[0][5].waves.shape == (1, 1, 8000)
    names = [type(one).__name__ for one in observers.observers_of(trainer, None, None, None, None, None)]  # type: ignore[arg-type]
    assert names == ["Profile", "Rows", "Videos", "Best", "Callbacks"]


def test_small_clips_are_enlarged_and_a_run_keeps_its_id(tmp_path: Path) -> None:
    clip = torch.stack([torch.full((4, 200, 3), level, dtype=torch.uint8) for level in (0, 100, 200)])
    with Image.open(io.BytesIO(animation(clip, 4.0))) as shown:
        assert (shown.size, shown.n_frames, shown.info["duration"], shown.info["loop"]) == ((400, 8), 3, 250, 0)
    with Image.open(io.BytesIO(animation(clip, 4.0, width=100))) as shown:
        assert shown.size == (200, 4)
    first = run_id(tmp_path, resumed=False)
    assert len(first) == 8
    assert run_id(tmp_path, resumed=True) == first
    for text, good in (("x" * 128, True), ("x" * 129, False), ("", False), ("a\tb", False)):
        (tmp_path / ".run_id").write_text(text)
        if good:
            assert run_id(tmp_path, resumed=False) == text
        else:
            with pytest.raises(ValueError, match="does not hold the id"):
                run_id(tmp_path, resumed=False)


def test_the_table_at_the_start_is_read_off_the_plan() -> None:
    config = recipe("shapes/branch")
    batch, window = (
        replace(config.batch, prompts=3, micro_batch=5),
        replace(config.rollout.window, branches=2, at=[2, 3]),
    )
    config = replace(config, batch=batch, iterations=7, rollout=replace(config.rollout, window=window))
    schedule = SimpleNamespace(num_steps=9, stochastic=(True, True, False))
    group = SimpleNamespace(trained=[[0], [1, 2]], shared=True, schedule=schedule)
    plan: Any = SimpleNamespace(
        shares=[1, 2], groups=[group] * 6, group_size=4, batches=lambda rank: [0] * (rank + 2), examples=None, updates=2
    )

    def cells(config: Any, **more: Any) -> dict[str, str]:
        table = plan_table(
            config, plan, dims=2048, clip=1e-3, device="cpu", parameters=12345, evaluations="9 passes", **more
        )
        left, right = (list(column.cells) for column in table.columns)
        return dict(zip(left, map(str, right), strict=True))

    kernel, kl = config.kernel, config.kl.kind
    assert cells(config, choices={"expert": "high"}) == {
        "model": "shapes (comes with the package)",
        "device": f"cpu, computes in {config.model.dtype}",
        "trains": "12,345 parameters: all weights",
        "expert": "high",
        "rollouts": "3 prompts x 2 branches x 4 = 24 clips per iteration",
        "micro-batches": "24 clips / 2 rank(s) = 3 micro-batch(es) of up to 5 each",
        "steps": "9 denoising steps, 2 explore, trained 1 + 2, what a group shares runs once",
        "network": "9 passes",
        "total": "7 iterations = 14 optimizer updates",
        "clip range": "1.00e-03 at 2,048 latent dimensions",
        "kernel": f"{kernel.name}, eta {kernel.eta:.4g}; trust region {config.trust_region.mode}, KL {kl}",
    }
    plan.examples, group.shared = [1], False
    model = replace(config.model, path="mine", lora=LoraSpec(rank=3))
    found = cells(
        replace(config, model=model, rollout=replace(config.rollout, window=replace(window, branches=1, at=[2])))
    )
    assert found["given clips"].startswith("3 prompts x 4 = 24 clips")
    assert found["steps"][-5:] == "1 + 2"
    assert (found["model"], found["trains"]) == ("mine", "12,345 parameters: a LoRA of rank 3")


def test_a_line_of_an_iteration_and_bars_of_a_run(capsys) -> None:
    row = {"loss/policy": 0.25, "gradient/norm": 0.5, "time/total": 2.0, "kl/total": 1e-3, "kl/velocity": 1.0}
    crew = {"crew/workers": 2.0, "crew/idle_s": 0.0, "crew/busy_s": 0.0, "crew/queue": 3.0, "crew/staleness": 0.0}
    assert iteration_line(1, 9, row, 200.0) == "1/9  loss 0.250  kl 1.0e-03  grad 0.5  2.0 s  3 min left"
    assert (
        iteration_line(1, 9, {**row, **crew}, 2.0)
        == "1/9  loss 0.250  2 workers 0% idle  queue 3  kl 1.0e-03  2.0 s  2 s left"
    )
    terminal = Terminal(enabled=True, progress=True, total=9)
    assert terminal._progress.disable  # nobody looks
    with terminal:
        terminal.start_at(4)
        terminal.listen("decode", 2, 5)
    run, phase = terminal._progress.tasks
    assert (run.completed, run.total, phase.description, phase.completed, phase.total) == (4, 9, "  decode", 2, 5)
    capsys.readouterr()


def test_an_evaluation_says_how_far_it_is_where_no_bar_does(monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr("sage_grpo.printing.time.monotonic", lambda: now[0])
    terminal = Terminal(enabled=True, progress=True, total=9)
    for now[0], phase, done in ((50, "evaluate", 0), (60, "evaluate", 1), (80, "decode", 2), (80, "evaluate", 2)):
        terminal.listen(phase, done, 8)
    assert capsys.readouterr().out == "evaluation: 2/8 micro-batches, 90 s left\n"
