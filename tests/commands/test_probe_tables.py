"""What `sage-grpo probe` prints and writes of what it found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.commands import probe
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.probe.estimate import Advice, Effect, Estimate
from sage_grpo.probe.probe import ProbeResult
from sage_grpo.probe.spec import ProbeSpec
from sage_grpo.probe.ways import Measured, Way, WaysResult
from sage_grpo.training.config import CheapSpec


def estimate(value: float) -> Estimate:
    return Estimate(value=value, low=value - 0.25, high=value + 0.5)


def effect(first: float, drift: bool = True) -> Effect:
    names = ("start", "explored", "linear", "std", "reward")
    numbers = {name: estimate(first + place) for place, name in enumerate(names)}
    return Effect(**numbers, drift=estimate(first - 2) if drift else None)


def finding(**changes: Any) -> Any:
    advice = Advice(steps=[2], weights=[1.0], eta=0.5, eta_is_safe=True)
    made: Any = ProbeResult(
        eta=1.0, steps=[(2, effect(0.0)), (5, effect(1.0))], every=effect(2.0), best=5, etas=[(0.5, effect(3.0))],
        still=None, advice=advice, passes=9,  # type: ignore[arg-type]
    )  # fmt: skip
    return replace(made, **changes)


def printed(capsys: pytest.CaptureFixture[str], found: Any, text: str | None, kernel: str = "sage") -> list[str]:
    options = probe.Options(kernel=KernelSpec(name=kernel, eta=1.0), probe=ProbeSpec(out="here"))
    probe._print(found, options, text)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]


def test_a_probe_is_two_tables_and_a_snippet(capsys) -> None:
    told = printed(capsys, finding(), "rollout: here\n")
    assert told[:8] == [
        "sage at eta 1: exploring at",
        "step start explored R std reward drift",
        "2 0.00 1.00 2.00 3.00 +4.000 -2.000",
        "0.75..1.50 1.75..2.50 +3.750..+4.500 -2.250..-1.500",
        "5 1.00 2.00 3.00 4.00 +5.000 -1.000",
        "1.75..2.50 2.75..3.50 +4.750..+5.500 -1.250..-0.500",
        "all 2.00 3.00 4.00 5.00 +6.000 +0.000",
        "2.75..3.50 3.75..4.50 +5.750..+6.500 -0.250..+0.500",
    ]
    assert told[8:11] == [
        "exploring at step 5 with",
        "eta start explored R std reward drift",
        "0.5 3.00 4.00 5.00 6.00 +7.000 +1.000",
    ]
    assert told[12].startswith("start, explored: shares")
    assert told[-3:] == [
        "Steps were compared at eta 1; probe again with kernel.eta 0.5 to be sure.",
        "rollout: here",
        "In here: snippet.yaml (for train --config), probe.json, probe.png",
    ]
    assert len(told) == 19


def test_a_probe_says_what_is_lacking(capsys) -> None:
    unsafe = Advice(steps=[], weights=[], eta=1.0, eta_is_safe=False)
    bare = {"steps": [(2, effect(0.0, False))], "every": effect(2.0, False), "etas": [(0.5, effect(3.0, False))]}
    told = printed(capsys, finding(advice=unsafe, **bare), None, "sage_exact")
    assert "step start explored R std reward" in told
    for said in (
        "The reward has no part named drift",
        "! Every eta costs reward or adds drift; 1 is the smallest tried.",
        "For sage_exact, eta = sqrt 2 = 1.414 explores most",
        "! No step's R is distinguishable from 0: raise probe.prompts or probe.members. No snippet.",
    ):
        assert said in " ".join(told)
    advice = replace(finding().advice, eta=1.0)
    told = printed(capsys, finding(advice=advice), "x")
    assert not [line for line in told if line.startswith(("Steps were", "!", "For sage_exact", "The reward has"))]


def ways(best: bool) -> WaysResult:
    full = Way(after=4, before=3, solver="euler", cheap=CheapSpec())
    short = replace(full, after=2, solver="ab2")
    found = Measured(way=short, passes=6.0, seconds=0.5, correlation=estimate(0.5), reward=estimate(-0.125))
    return WaysResult(full, 8.0, 2.0, 3, [found], found if best else None, "seconds", 99)


def test_ways_are_a_table_and_a_file_that_is_never_an_older_probes(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sage_grpo.probe.ways.ways_document", lambda prober, found: {"best": found.best is not None})
    monkeypatch.setattr("sage_grpo.probe.ways.ways_snippet", lambda found: "rollout: cheap\n" if found.best else None)
    options = probe.Options(probe=ProbeSpec(out=str(tmp_path)))
    prober: Any = None
    probe._write_ways(prober, ways(True), options)
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    assert told[1:5] == [
        "before after solver without passes seconds alike reward",
        "3 4 euler - 8.0 2 full",
        "3 2 ab2 - 6.0 0.5 0.50 -0.125",
        "0.25..1.00 -0.375..+0.375",
    ]
    least = options.probe.ways.least
    said = f"Measured: the way with the fewest seconds that is alike by at least {least:g}; it saves 75% of the full way's."
    assert said in " ".join(told)
    assert told[-2:] == ["rollout: cheap", f"In {tmp_path}: ways.yaml (for train --config), ways.json"]
    assert json.loads((tmp_path / "ways.json").read_text()) == {"best": True}
    assert (tmp_path / "ways.yaml").read_text() == "rollout: cheap\n"
    quiet = replace(options, probe=replace(options.probe, json=True))
    probe._write_ways(prober, ways(False), quiet)
    assert json.loads(capsys.readouterr().out) == {"best": False}
    assert not (tmp_path / "ways.yaml").exists()
    probe._write_ways(prober, ways(False), options)
    assert f"No way is alike by {least:g} with the whole" in " ".join(capsys.readouterr().out.split())


def test_a_snippet_of_an_older_probe_is_removed_and_json_is_alone(tmp_path: Path, capsys, monkeypatch) -> None:
    texts, drawn = ["rollout: x\n", None], []
    monkeypatch.setattr("sage_grpo.probe.figure.save_figure", lambda found, options, file: drawn.append(file))
    monkeypatch.setattr("sage_grpo.probe.probe.document", lambda prober, found: {"eta": found.eta})
    monkeypatch.setattr("sage_grpo.probe.probe.snippet", lambda found, options: texts[len(drawn)])
    prober: Any = None
    probe._write(prober, finding(), probe.Options(probe=ProbeSpec(out=str(tmp_path))))
    assert (tmp_path / "snippet.yaml").read_text() == "rollout: x\n"
    assert "exploring at" in capsys.readouterr().out
    probe._write(prober, finding(), probe.Options(probe=ProbeSpec(out=str(tmp_path), json=True)))
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "probe.json").read_text()) == {"eta": 1.0}
    assert not (tmp_path / "snippet.yaml").exists()
    assert drawn == [tmp_path / "probe.png"] * 2
