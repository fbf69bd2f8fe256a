"""Before a run of a distilled checkpoint, plan and doctor say that its guidance or its steps are not those of its authors."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tiny
from sage_grpo.models.spec import ModelSpec
from sage_grpo.plan import hardware, show
from sage_grpo.plan.costs import forecast
from sage_grpo.plan.description import describe
from sage_grpo.tools.doctor.machine import settings

SIZE = {"frames": 5, "height": 32, "width": 32}


@pytest.fixture
def named(checkpoint, make_config, tmp_path):
    def make(name: str, scale: float | None, steps: int):
        config = make_config(kind="wan_t2v", model={**SIZE, "guidance_scale": scale}, rollout={"steps": steps})
        folder = tiny.variant(checkpoint("wan_t2v"), tmp_path / name)
        return replace(config, model=replace(config.model, path=str(folder)))

    return make


@pytest.mark.parametrize(
    ("name", "scale", "steps", "wanted"),
    [
        ("Wan2.2-Lightning", None, 20, ["model.guidance_scale is 5", "rollout.steps is 20", "rollout.steps 4"]),
        ("Wan2.2-Lightning", 1.0, 20, ["rollout.steps is 20"]),
        ("Wan2.2-Lightning", 1.0, 4, []),
        ("Wan2.2", None, 20, []),
    ],
)
@pytest.mark.filterwarnings("ignore:.*distilled")
def test_a_plan_says_so(name: str, scale: float | None, steps: int, wanted: list[str], named) -> None:
    config = named(name, scale, steps)
    said = forecast(config, hardware.cpu())
    text = dict(show.model_rows(said)).get("distilled", "")
    assert bool(text) == bool(wanted)
    assert all(part in text for part in wanted)
    assert (text in show.short(said)) == bool(wanted)
    assert show.document(said, [], [], said)["model"].get("distilled", "") == text
    finding = settings(said, [])
    assert finding.status == ("warn" if wanted else "pass")
    assert name == "Wan2.2" or name in finding.value


def test_guidance_that_is_an_input_is_not_counted(checkpoint, make_config, tmp_path) -> None:
    folder = tiny.variant(checkpoint("flux"), tmp_path / "FLUX.1-turbo")
    config = make_config(kind="flux")
    config = replace(config, model=ModelSpec(path=str(folder), cache=None))
    assert settings(describe(config), []).status == "pass"
