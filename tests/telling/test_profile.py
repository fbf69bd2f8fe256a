"""`profile` records one iteration and changes nothing but the files in its folder."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from sage_grpo.session import run as train
from sage_grpo.telling.clock import Clock, Recorder, kernels_of
from sage_grpo.telling.observers import Profile
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.update import Diverged
from trainer_helpers import rows

PHASES = ["rollout", "decode", "reward", "update"]


def final(config: TrainConfig) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (Path(config.out) / "final").rglob("*.safetensors")}


@pytest.mark.slow
def test_a_recorded_run_is_the_same_run_and_leaves_traces_and_a_table(
    make_config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_config(out=str(tmp_path / "plain"))
    recorded = replace(plain, out=str(tmp_path / "recorded"), profile=1)
    train(plain)
    assert not (tmp_path / "plain" / "profile").exists()
    capsys.readouterr()
    train(recorded)
    said = capsys.readouterr().out
    assert rows(plain) == rows(recorded)
    assert final(plain) == final(recorded)
    folder = tmp_path / "recorded" / "profile"
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        [*(f"{name}.json.gz" for name in PHASES), "table.txt"]
    )
    names = {}
    for phase in PHASES:
        with gzip.open(folder / f"{phase}.json.gz") as file:
            names[phase] = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert [any("Backward" in name for name in names[phase]) for phase in ("update", "rollout")] == [True, False]
    text = (folder / "table.txt").read_text()
    assert [line.split()[0] for line in text.splitlines()[3:7]] == PHASES
    assert text.splitlines()[3] in said


def test_only_the_first_passes_are_recorded(tmp_path: Path) -> None:
    clock = Clock()
    clock.recorder = recorder = Recorder(tmp_path, passes=2)
    with clock("rollout"):
        tick = clock.ticker(5)
        for _ in range(5):
            torch.ones(3).cumsum(0)
            tick()
    (part,) = recorder.recorded
    assert part.passes == 2
    assert {kernel.name: kernel.calls for kernel in part.kernels}["aten::cumsum"] == 2


def test_kernels_are_those_of_the_gpu_where_there_is_one_the_longest_first() -> None:
    def event(key: str, cpu: float, gpu: float | None = None, annotation: bool = False) -> SimpleNamespace:
        kind = DeviceType.CPU if gpu is None else DeviceType.CUDA
        times = {"self_cpu_time_total": cpu, "self_device_time_total": gpu}
        return SimpleNamespace(key=key, device_type=kind, is_user_annotation=annotation, count=3, **times)

    on_cpu = [event("add", 2e6), event("matmul", 5e6), event("phase", 9e6, annotation=True)]
    both = [*on_cpu, event("kernel", 1e6, 0.5e6), event("other", 1e6, 4e6)]
    for events, found in ((on_cpu, [("matmul", 5.0), ("add", 2.0)]), (both, [("other", 4.0), ("kernel", 0.5)])):
        recording: Any = SimpleNamespace(key_averages=lambda events=events: events)
        assert [(one.name, one.seconds) for one in kernels_of(recording)] == found


def test_a_clock_tells_its_listener_and_adds_up_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], []
    monkeypatch.setattr("sage_grpo.telling.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = Clock(lambda *seen: told.append(seen))
    for seconds in (2.0, 3.0):
        with clock("rollout"):
            tick = clock.ticker(2)
            tick()
            tick()
            now[0] += seconds
    clock._memory["rollout"] = 1.5  # a GPU says it
    assert told == [("rollout", 0, 1), ("rollout", 1, 2), ("rollout", 2, 2)] * 2
    assert clock.report() == {"time/rollout": 5.0, "time/total": 5.0, "time/peak_gib_rollout": 1.5}
    assert clock.report() == {"time/total": 0}


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(profile, "export_chrome_trace", full)
    clock = Clock()
    clock.recorder = Recorder(tmp_path)
    with pytest.warns(UserWarning, match=r"Writing a trace .* No space left .* The run goes on"), clock("decode"):
        torch.ones(1)


def test_an_iteration_that_diverged_leaves_no_table(tmp_path: Path) -> None:
    """The sentinel may go back and the run go on: the next row is another iteration's."""
    said: list[str] = []
    trainer = SimpleNamespace(
        config=SimpleNamespace(profile=0),
        state=SimpleNamespace(iteration=0),
        world=SimpleNamespace(is_main=True),
        clock=Clock(),
    )
    profile_of = Profile(trainer, SimpleNamespace(say=said.append), tmp_path)
    with pytest.raises(Diverged), profile_of.during(0):
        raise Diverged("not finite")
    assert trainer.clock.recorder is None
    profile_of.after({})
    assert not said
