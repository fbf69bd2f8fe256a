"""A run that is cut off goes on from its last point, and its row is the one of a run that nobody disturbed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sage_grpo.health.sentinel as sentinel_module
from sage_grpo.cli.compare import start as recipe
from sage_grpo.tools.compare import measure as lab
from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.prepare import CompareJob, prepare

ARMS: dict[str, dict[str, Any]] = {
    "sage": {"optimizer.ema": 0.9, "optimizer.target_kl": 0.01},
    "nft": {},
    "rollback": {"sentinel.action": "rollback", "sentinel.patience": 1, "sentinel.window": 5, "evaluate.every": 2},
}


class CutOff(BaseException):
    """As a kill: nothing that the run does can catch it."""


@pytest.fixture
def short_leash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only sign is that the sentinel remembers two iterations: it is there in the third, and acted on after the fourth."""
    monkeypatch.setattr(sentinel_module, "SIGNS", {"late": lambda row, past: "late" if len(past.start) > 1 else ""})


def run(
    job: CompareJob, folder: Path | None = None, *, until: int | None = None, notes: list[str] | None = None
) -> Any:
    """The row; None where the run was cut off in iteration `until`, counted from 0."""
    step, tell = lab.Trainer.step, ([] if notes is None else notes).append

    def cut(self: Any) -> dict[str, float]:
        row = step(self)
        if self.state.iteration - 1 == until:
            raise CutOff
        return row

    with pytest.MonkeyPatch.context() as patch, suppress(CutOff):
        patch.setattr(lab.Trainer, "step", cut)
        return lab.measure(job, {}, unfinished=folder, on_note=tell)


@pytest.mark.slow
@pytest.mark.usefixtures("short_leash")
@pytest.mark.parametrize("arm", ARMS)
def test_a_run_that_is_cut_off_again_and_again_has_the_row_of_one_that_was_not(
    arm: str, toy_suite: Suite, tmp_path: Path
) -> None:
    made = Arm(name=arm, recipe="shapes/nft" if arm == "nft" else "shapes/sage", options=ARMS[arm])
    suite = replace(toy_suite, arms=(made,), baseline=arm, seeds=(1,), iterations=7, points=(2, 4, 6))
    (job,), folder, notes = prepare(suite, recipe), tmp_path / "kept", list[str]()
    whole = run(job)
    assert whole["status"] == "done"
    backs = [at for at, _, action in whole["sentinel"] if action == "rollback"]
    assert backs[:1] == [4] * (arm == "rollback")
    for until in (1, 2, 5):
        assert run(job, folder, until=until, notes=notes) is None
        assert len(list(folder.glob("*"))) <= 2  # the last point, and what the sentinel may go back to
    row = run(job, folder, notes=notes)
    assert {**row, "seconds": None} == {**whole, "seconds": None}
    assert row["seconds"]["total"] > 0
    said = [f"continues after iteration {at}." for at in (2, 4)]
    assert notes == (["continues after iteration 0.", *said] if arm == "rollback" else said)
