"""Checkpoints whose sampling we cannot reproduce are refused by name, before any weights load."""

from __future__ import annotations

import json

import diffusers
import pytest

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.spec import ModelSpec


@pytest.fixture
def unloadable(checkpoint, tmp_path):
    """A variant of a checkpoint whose transformer cannot be read: an error about anything else came before."""

    def make(kind: str, **components):
        folder = tiny.variant(checkpoint(kind), tmp_path / kind, **components)
        for file in folder.glob("transformer*/*.safetensors"):
            file.unlink()
            file.touch()
        return folder

    return make


def refused(folder, message: str, **fields) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec(path=str(folder), cache=None, **fields).load("cpu")


def edit(file, **values) -> None:
    tiny.write(file, {**json.loads(file.read_text()), **values})


def flow_euler(**config):
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0, **config)


def dpm(**config):
    plain = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return diffusers.DPMSolverMultistepScheduler(**{**plain, **config})


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (diffusers.FlowMatchHeunDiscreteScheduler(), "FlowMatchHeunDiscreteScheduler; supported are FlowMatchEuler"),
        (flow_euler(use_dynamic_shifting=True), "sets use_dynamic_shifting to True"),
        (flow_euler(invert_sigmas=True), "sets invert_sigmas to True"),
        (flow_euler(stochastic_sampling=True), "sets stochastic_sampling to True"),
        (tiny.unipc(use_dynamic_shifting=True), "sets use_dynamic_shifting to True"),
        (tiny.unipc(use_flow_sigmas=False), "sets use_flow_sigmas to False"),
        (tiny.unipc(prediction_type="epsilon"), "sets prediction_type to 'epsilon'"),
        (tiny.unipc(final_sigmas_type="sigma_min"), "sets final_sigmas_type to 'sigma_min'"),
        (tiny.unipc(use_karras_sigmas=True), "sets use_karras_sigmas to True"),
        (tiny.unipc(use_exponential_sigmas=True), "sets use_exponential_sigmas to True"),
        (dpm(algorithm_type="sde-dpmsolver++"), r"algorithm_type to 'sde-dpmsolver\+\+'.*only 'dpmsolver' or 'dpm"),
    ],
)
def test_schedulers(scheduler, message: str, unloadable) -> None:
    refused(unloadable("wan_t2v", scheduler=scheduler), message)


def test_beta_sigmas_without_scipy(monkeypatch, unloadable) -> None:
    module = "diffusers.schedulers.scheduling_flow_match_euler_discrete"
    monkeypatch.setattr(f"{module}.is_scipy_available", lambda: False)
    folder = unloadable("wan_t2v")
    edit(folder / "scheduler" / "scheduler_config.json", use_beta_sigmas=True)
    refused(folder, "a package that is not installed: .*scipy")


def test_schedulers_that_hunyuans_pipeline_cannot_hand_sigmas_to(unloadable) -> None:
    refused(unloadable("hunyuan15_t2v", scheduler=dpm()), "is a DPMSolverMultistepScheduler; supported are FlowMatch")


def test_guiders(unloadable) -> None:
    folder = unloadable("hunyuan15_t2v", guider=diffusers.AdaptiveProjectedGuidance())
    refused(folder, "is a AdaptiveProjectedGuidance; supported is ClassifierFreeGuidance")


@pytest.mark.parametrize("part", [{"start": 0.2}, {"stop": 0.8}])
def test_guidance_of_a_part_of_the_steps(part, unloadable) -> None:
    refused(unloadable("hunyuan15_t2v", guider=diffusers.ClassifierFreeGuidance(**part)), "start 0.*to stop")


def test_guidance_of_an_expert_that_is_not_there(unloadable) -> None:
    refused(unloadable("wan_t2v"), "guidance_scale_2 is 3, but .* has no second expert", guidance_scale_2=3.0)


def test_first_guidance_off_and_second_on() -> None:
    with pytest.raises(ModelError, match=r"guidance off for both experts.*guidance_scale_2 is 3"):
        ModelSpec(guidance_scale=1.0, guidance_scale_2=3.0)
    ModelSpec(guidance_scale=1.0, guidance_scale_2=1.0)


def test_meanflow_models(unloadable) -> None:
    folder = unloadable("hunyuan15_i2v")
    edit(folder / "transformer" / "config.json", use_meanflow=True)
    refused(folder, "is a MeanFlow model .*step_distilled")


def test_solver_that_a_model_does_not_bring() -> None:
    from toy_family import Toy

    from sage_grpo.models.policy import build_solver

    toy = Toy(ModelSpec(), "cpu")
    with pytest.raises(ModelError, match='solver "checkpoint" needs a model that brings one, and Toy has no'):
        build_solver(toy, "checkpoint", 4)
    with pytest.raises(ModelError, match='"heun" is unknown: use euler, ab2 or checkpoint'):
        build_solver(toy, "heun", 4)  # type: ignore[arg-type]
