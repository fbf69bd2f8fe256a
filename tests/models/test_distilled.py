"""Distilled checkpoints are told by their names and files, and only they; who uses one as if it were not is told what to set."""

from __future__ import annotations

import warnings
from pathlib import Path

import tiny
from sage_grpo.models.distilled import Distilled, find_distilled
from sage_grpo.models.spec import AdapterSpec, ModelSpec
from sage_grpo.training.config import EvalConfig

DISTILLED = {
    "stabilityai/stable-diffusion-3.5-large-turbo": (4, 4),
    "black-forest-labs/FLUX.1-schnell": (1, 4),
    "Lightricks/LTX-Video-0.9.8-13B-distilled": (4, 10),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v_step_distilled": (8, 12),
    "lightx2v/Wan2.2-Lightning": (4, 4),
    "lightx2v/Wan2.1-T2V-14B-StepDistill-CfgDistill": (4, 4),
    "FastVideo/FastWan2.1-T2V-1.3B-Diffusers": (3, 3),
    "somebody/Wan2.1-Self-Forcing": None,
    "somebody/Qwen-Image-Lightning": (4, 8),
    "somebody/Qwen-Image-Lightning-8steps-V1.0": (8, 8),
    "/models/sd3_turbo/": None,
}
PLAIN = (
    *("Lightricks/LTX-Video-0.9.7-dev", "InstantX/flux-dev-de-distill-diffusers", "somebody/undistilled-flux-schnell"),
    *("Lightning-AI/some-model", "/turbo/checkpoints/sd3", "/runs/sd3-10steps", None),
)


def test_names_of_distilled_checkpoints() -> None:
    for path, steps in DISTILLED.items():
        found = find_distilled(ModelSpec(path=path))
        assert found is not None, path
        assert found.steps == steps, path
        assert Path(path).name in found.evidence
    assert not [path for path in PLAIN if find_distilled(ModelSpec(path=path)) is not None]


TURBO = "stable-diffusion-3.5-large-turbo"


def test_advice_names_what_to_set() -> None:
    few = Distilled(evidence='its name is "x-turbo"', steps=(4, 8))
    assert few.advice(1.0) is few.advice(1.0, 8) is few.advice(1.0, 3) is None
    assert "Set model.guidance_scale 1 and rollout.steps 8" in (few.advice(7.0) or "")
    assert "model.guidance_scale is 7 and rollout.steps is 20" in (few.advice(7.0, 20) or "")
    assert "Set rollout.steps 8;" in (few.advice(1.0, 20) or "")
    assert "Set model.guidance_scale 1;" in (few.advice(7.0, 4) or "")
    unknown = Distilled(evidence="its guider")
    assert unknown.advice(1.0, 50) is None
    assert "Set model.guidance_scale 1;" in (unknown.advice(6.0, 50) or "")


def test_loading_warns_where_guidance_is_left_on(checkpoint, tmp_path) -> None:
    def told(kind: str, name: str, **fields) -> list[str]:
        folder = tmp_path / name
        folder = folder if folder.is_dir() else tiny.variant(checkpoint(kind), folder)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ModelSpec(path=str(folder), cache=None, train=False, **fields).load("cpu")
        return [str(one.message) for one in seen if "distilled" in str(one.message)]

    (text,) = told("sd3", TURBO)
    assert TURBO in text
    assert "model.guidance_scale is 7" in text
    assert not told("sd3", TURBO, guidance_scale=1.0)
    assert not told("flux", "FLUX.1-dev-turbo")


def test_an_evaluation_takes_the_checkpoints_own_steps_unless_told() -> None:
    grid = ModelSpec(path="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", sigmas=[1.0, 0.9, 0.5])
    turbo = AdapterSpec(path="loras/turbo", file="wan_4step_distill.safetensors")
    expected = [
        (ModelSpec(path="Wan-AI/Wan2.1-T2V-1.3B-Diffusers"), 40),
        (grid, 3),
        (ModelSpec(path="lightx2v/Wan2.1-T2V-14B-StepDistill-CfgDistill"), 4),
        (ModelSpec(path="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", adapters=[turbo]), 4),
        (ModelSpec(path="somebody/some-turbo"), 40),
    ]
    for spec, steps in expected:
        assert EvalConfig().steps_for(spec) == steps, spec.path
        assert EvalConfig(steps=7).steps_for(spec) == 7
