"""A healthy run raises nothing, over kinds of checkpoints and over seeds; and the command says what it found."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sage_grpo.cli.main import main
from sage_grpo.models.spec import LoraSpec
from sage_grpo.plan.description import describe
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import assemble
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.tools.doctor import DoctorSpec, examine
from sage_grpo.tools.doctor.check import ORDER, REMEDY, WHY, Check, show
from sage_grpo.training.config import DataConfig
from sage_grpo.training.inputs import build

NAMES = [
    *("versions", "device", "plan", "files", "settings", "stability", "prompt", "padding", "pipeline", "vae"),
    *("guidance", "reward valid", "reward spread", "reward batch", "reward prompt", "reward statistics"),
    *("ratio", "gradients", "update", "step size", "ranks", "trust region", "save"),
]


def raised(findings: Sequence[Check]) -> list[Check]:
    return [finding for finding in findings if finding.status in ("warn", "fail")]


@pytest.mark.slow
def test_healthy_checkpoint(make_config, prompts, tmp_path: Path) -> None:
    apart = tmp_path / "apart.txt"
    apart.write_text("a house\na green frog\n")  # not trained on
    size = {"frames": 5, "height": 32, "width": 32}
    config = make_config(
        data=DataConfig(prompts=str(prompts), eval_prompts=str(apart)),
        kind="hunyuan15_t2v",
        model={**size, "lora": LoraSpec(rank=2), "guidance_scale": 3.0},
        kernel=KernelSpec(name="sage_exact", eta=0.7),
        rewards=[RewardSpec(name="doctor_rewards:pattern", batch_size=0)],
    )
    heard: list[Check] = []
    found = examine.examine(config, DoctorSpec(), heard.append)
    assert heard == found
    assert [finding.name for finding in found] == NAMES
    assert not raised(found)
    assert all(finding.why for finding in found)


@pytest.mark.slow
def test_healthy_shapes() -> None:
    config, spec = replace(recipe("shapes/sage"), seed=3), DoctorSpec(prompts=3)
    made = build(recipe("shapes/sage"))
    sample = examine.prepare(assemble(examine.small(config, spec), made))
    found = [*examine.of_schedule(describe(config)), *examine.of_sampling(sample)]
    found += examine.of_learning(sample)
    assert not raised(found)
    assert len(found) == 14
    assert len(sample.trainer.prompt_encoder.encoded) <= spec.prompts + 1  # not those of the whole run


def test_command_fails_before_it_loads_anything(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(examine, "over_ranks", lambda *_: [Check("versions", "warn", "rank 1: 3")])
    file = tmp_path / "mine.yaml"
    file.write_text(f"recipe: shapes/sage\ndata:\n  prompts: {tmp_path}/nothing.txt\n")
    assert main(["doctor", str(file)]) == 1
    text = "".join(capsys.readouterr().out.split())
    text, _, page = text.partition("Whattochangewhenarungoeswrong:")
    assert (Path(__file__).parents[2] / page).is_file()
    assert "nothing.txt" in text
    assert "rank1:3" in text
    # "versions" is skipped where the package itself is not installed
    assert re.search(r"\dpass,(1skip,)?1warn,(1skip,)?1fail$", text)
    assert main(["doctor", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "fail"


def test_a_stage_that_breaks_is_a_finding_and_the_others_go_on(make_config, monkeypatch) -> None:
    def breaks(*given: object) -> Check:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(examine.learning, "guidance", breaks)
    found = {one.name: one for one in examine.examine(make_config(), DoctorSpec(prompts=2, members=2))}
    assert {one.status for one in found.values()} <= set(ORDER)
    assert found["sampling"].status == "fail"
    assert "no more memory" in found["sampling"].value
    assert found["ratio"].status == "pass"


def test_why_and_remedy_are_told_only_where_something_is_wrong(capsys) -> None:
    from rich.console import Console

    for status in ("pass", "skip", "warn", "fail"):
        show(one := Check("ratio", status, "measured"), Console(width=200))
        text = capsys.readouterr().out
        assert "measured" in text
        assert (one.why in text and f"-> {one.remedy}" in text) == (status in ("warn", "fail"))
        assert (one.why in text) == (status in ("warn", "fail"))
    assert WHY.keys() == REMEDY.keys() >= set(NAMES), "every check says why it matters"
