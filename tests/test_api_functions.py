"""Functions of the API: their arguments for the parts that do the work, and their results."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo import api
from sage_grpo.generation import evaluate, generate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.run import session
from sage_grpo.types import Sound


def test_pairs_are_of_the_base_and_the_tuned_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(evaluate, "measure_pair", lambda *given: asked.append(given) or ("base", "tuned"))
    monkeypatch.setattr(evaluate, "compare", lambda base, tuned: {"between": (base, tuned)})
    pairs = api.evaluate_pairs(model=ModelSpec(shift=2.0), rewards="video_stats", prompts=["a", "b"], lora="adapter")
    assert (pairs.base, pairs.tuned, pairs.differences) == ("base", "tuned", {"between": ("base", "tuned")})
    ((spec, objects),) = asked
    assert (spec.model.shift, spec.lora, [one.name for one in spec.rewards]) == (2.0, "adapter", ["video_stats"])
    assert [prompt.text for prompt in objects.prompts] == ["a", "b"]
    assert spec.settings.prompts == 2, "all that are given"


@pytest.mark.parametrize("trust", [None, True])
def test_a_run_is_trusted_only_if_that_was_asked(trust: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def remembers(kind: type) -> Any:
        return lambda folder, **options: asked.append((folder, options)) or kind(run=folder)

    for kind in (evaluate.EvaluateSpec, generate.GenerateSpec):
        monkeypatch.setattr(kind, "of_run", remembers(kind))
    monkeypatch.setattr(generate.GenerateSpec, "find", lambda spec, model: SimpleNamespace(load=lambda given: None))
    monkeypatch.setattr(generate, "sample", lambda spec, loaded, clips: [])
    monkeypatch.setattr(evaluate, "measure", lambda spec, objects: spec)
    options = {} if trust is None else {"trust_run": trust}
    assert api.evaluate("somewhere", **options).run == "somewhere"
    settings = api.evaluate("somewhere", rewards="video_stats", prompts=["a", "b"], **options).settings
    assert settings == evaluate.EvaluateSpec().settings, "a run has its own number of prompts"
    with pytest.raises(ValueError, match=r"torch\.cat"):  # no clip was made
        api.generate(["a"], run="somewhere", **options)
    of_the_run = {"trust": bool(trust)}
    assert asked == [("somewhere", {**of_the_run, "rewards": own}) for own in (True, False)] + [
        ("somewhere", of_the_run)
    ]


def test_clips_of_all_batches_come_with_their_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(None, torch.full((n, 2, 4, 4, 3), n), Sound(torch.full((n, 1, 5), float(n)), 16000)) for n in (2, 1)]
    specs: list[generate.GenerateSpec] = []
    monkeypatch.setattr(generate, "sample", lambda spec, loaded, clips: specs.append(spec) or batches)
    loaded = SimpleNamespace(video=SimpleNamespace(fps=8.0))
    monkeypatch.setattr(generate.GenerateSpec, "find", lambda spec, model: SimpleNamespace(load=lambda given: loaded))
    made = api.generate(["a", "b", "c"], seed=3)
    assert made.videos[:, 0, 0, 0, 0].tolist() == [2, 2, 1]
    assert (made.sound.waves[:, 0, 0].tolist(), made.sound.rate) == ([2.0, 2.0, 1.0], 16000)
    assert (made.prompts, made.seeds, made.fps) == (["a", "b", "c"], [3, 4, 5], 8.0)
    batches[:] = [(None, torch.zeros(3, 2, 4, 4, 3), None)]
    assert api.generate(["a", "b", "c"], model=ModelSpec(shift=2.0), run="somewhere", progress=True).sound is None
    assert [(one.run, one.model.shift, one.progress) for one in specs] == [
        (None, ModelSpec().shift, False),
        ("somewhere", 2.0, True),
    ]
    batches[:] = [(None, torch.zeros(1, 2, 4, 4, 3), Sound(torch.zeros(1, 1, 5), 8000))]
    assert api.generate(["a"]).sound.rate == 8000


@pytest.mark.parametrize(("quiet", "message"), [(False, "a report"), (True, "a report"), (False, "")])
def test_a_run_ends_with_its_report_unless_it_is_quiet(
    quiet: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "session", lambda *given, **named: nullcontext(SimpleNamespace(is_main=True)))
    ended = SimpleNamespace(iteration=3, stopped=True, model=None)
    monkeypatch.setattr(session, "run", lambda *given, **named: ended if named == {"quiet": quiet} else None)
    monkeypatch.setattr("sage_grpo.tools.report.page.leave_report", lambda out: message)
    result = api.train(replace(recipe("shapes/sage"), out=str(tmp_path)), quiet=quiet)
    assert (result.iteration, result.stopped, result.metrics) == (3, True, [])
    assert capsys.readouterr().out == ("a report\n" if message and not quiet else "")


@pytest.mark.parametrize("ranks", [False, True])
def test_the_module_is_the_command_and_a_rank_leaves_without_taking_the_interpreter_down(
    ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    def leave(status: int) -> None:
        done.append(status)
        raise SystemExit(99)

    monkeypatch.setattr("sage_grpo.cli.main.main", lambda: 3)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: done.append("exit functions"))
    monkeypatch.setattr(os, "_exit", leave)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=lambda name=name: done.append(name)))
    monkeypatch.setenv("RANK", "0") if ranks else monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sage_grpo", run_name="__main__")
    assert done == (["exit functions", "stdout", "stderr", 3] if ranks else [])
    assert ended.value.code == (99 if ranks else 3)
