"""`sage-grpo inspect`: tables of chosen kernels, and the grid of a checkpoint's own scheduler."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

import tiny
from sage_grpo.cli import main, probe
from sage_grpo.cli.inspect import Options, run
from sage_grpo.models.schedulers import own_sigmas
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.windows import Window
from sage_grpo.tools.probe.estimate import Advice, Effect, Estimate
from sage_grpo.tools.probe.probe import ProbeResult, ProbeSpec
from sage_grpo.training.config import LogConfig

NUMBER = re.compile(r"(?<![\w#])-?\d+(?:\.\d+)?(?:e[-+]\d+)?(?!\w)")
KERNELS = ["flow", "sage", "sage_exact"]
SHOWN = {"kernels": KERNELS, "steps": 4, "shift": 8.0, "window": Window(kind="fixed", start=0, length=3)}


def assert_alike(told: str, name: str) -> None:
    """Numbers to a thousandth: a library may add them up in another order."""
    golden = Path(__file__).with_name(name).read_text(encoding="utf-8")
    assert NUMBER.sub("_", told) == NUMBER.sub("_", golden)
    found, wanted = ([float(one) for one in NUMBER.findall(text)] for text in (told, golden))
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_tables_show_what_they_showed(capsys) -> None:
    assert run(Options(**SHOWN)) == 0
    assert_alike("".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines()), "inspect.txt")


def test_steps_without_noise_are_dim(monkeypatch) -> None:
    tables: list[Any] = []
    monkeypatch.setattr("rich.console.Console.print", lambda self, *things, **named: tables.extend(things))
    assert run(Options(**{**SHOWN, "kernels": ["sage"]})) == 0
    assert [row.style for row in tables[0].rows] == ["", "", "", "dim"]


@pytest.mark.parametrize(
    ("progress", "alone", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_bar_is_shown_unless_json_is_wanted(progress: bool, alone: bool, shown: bool, monkeypatch, capsys) -> None:
    bars: list[Any] = []
    prober = SimpleNamespace(failures=["a fault", "a fault"])
    monkeypatch.setattr("sage_grpo.tools.probe.probe.prepare", lambda *given: prober)
    monkeypatch.setattr(
        "sage_grpo.tools.probe.probe.probe",
        lambda prober, say, counting: say("word " * 40) or bars.append(counting) or finding(),
    )
    monkeypatch.setattr(probe, "_write", lambda *given: None)
    assert probe.run(probe.Options(log=LogConfig(progress=progress), probe=ProbeSpec(json=alone))) == 0
    assert [bar.keywords["shown"] for bar in bars] == [shown]
    assert capsys.readouterr() == ("" if alone else "word " * 40 + "\n", "a fault\n"), "no line is wrapped"


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["inspect", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_grid_is_the_checkpoints_own(checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    folder = tiny.variant(checkpoint("wan_t2v"), tmp_path / "wan", scheduler=scheduler)
    words = ["--model", str(folder), "--steps", "20", "--kernels", '["sage", "sage_exact"]']
    for more, shift in (([], 3.0), (["--shift", "7"], 7.0)):
        document = inspected(capsys, *words, *more)
        own = own_sigmas(scheduler, 20, shift, even=False)
        assert [row["sigma"] for row in document["kernels"]["sage"]["rows"]] == pytest.approx(own[:-1].tolist())
        assert (document["steps"], document["shift"], document["eta"]) == (20, shift, 0.5)
        told = ["Step 18 is deterministic, too" in " ".join(one["warnings"]) for one in document["kernels"].values()]
        assert told == [True, False]


def test_without_a_model_the_grid_is_even_and_a_kernel_has_its_own_clamp(capsys) -> None:
    document = inspected(capsys, "--steps", "29", "--kernels", "ode,sage,cps", "--sigma_max", "0.9")
    assert (document["model"], document["shift"], list(document["kernels"])) == (None, 5.0, ["ode", "sage", "cps"])
    sage = document["kernels"]["sage"]
    assert [row["step"] for row in sage["rows"] if row["std"] == 0] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 28]
    assert any("swallows" in text for text in sage["warnings"])
    assert document["kernels"]["ode"]["sensitivity_span"] is None
    assert {row["share"] for row in document["kernels"]["ode"]["rows"]} == {0.0}


def test_a_kernel_that_does_not_take_the_eta_is_left_out_by_name() -> None:
    with pytest.raises(ValueError, match=r'leave cps out with --kernels \["sage"\]'):
        run(Options(kernels=["sage", "cps"], eta=1.5))
    with pytest.raises(ValueError, match="kernels is empty"):
        run(Options(kernels=[]))


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
    assert told[:4] == [
        "sage at eta 1: exploring at",
        "step start explored R std reward drift",
        "2 0.00 1.00 2.00 3.00 +4.000 -2.000",
        "0.75..1.50 1.75..2.50 +3.750..+4.500 -2.250..-1.500",
    ]
    assert told[6:8] == ["all 2.00 3.00 4.00 5.00 +6.000 +0.000", "2.75..3.50 3.75..4.50 +5.750..+6.500 -0.250..+0.500"]
    etas = [
        "exploring at step 5 with",
        "eta start explored R std reward drift",
        "0.5 3.00 4.00 5.00 6.00 +7.000 +1.000",
    ]
    assert told[8:11] == etas
    assert told[-3:] == [
        "Steps were compared at eta 1; probe again with kernel.eta 0.5 to be sure.",
        "rollout: here",
        "In here: snippet.yaml (for train --config), probe.json",
    ]
    assert len(told) == 19


def test_a_snippet_of_an_older_probe_is_removed_and_json_is_alone(tmp_path: Path, capsys, monkeypatch) -> None:
    texts = [None, "rollout: x\n", None]
    monkeypatch.setattr("sage_grpo.tools.probe.probe.document", lambda prober, found: {"eta": found.eta})
    monkeypatch.setattr("sage_grpo.tools.probe.probe.snippet", lambda found, options: texts.pop(0))
    prober: Any = None
    probe._write(prober, finding(), probe.Options(probe=ProbeSpec(out=str(tmp_path))))
    probe._write(prober, finding(), probe.Options(probe=ProbeSpec(out=str(tmp_path))))
    assert (tmp_path / "snippet.yaml").read_text() == "rollout: x\n"
    assert "exploring at" in capsys.readouterr().out
    probe._write(prober, finding(), probe.Options(probe=ProbeSpec(out=str(tmp_path), json=True)))
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "probe.json").read_text()) == {"eta": 1.0}
    assert not (tmp_path / "snippet.yaml").exists()
