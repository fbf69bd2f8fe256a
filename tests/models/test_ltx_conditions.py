"""LTXConditionPipeline: pictures and clips at any place, and a clip to start from, are the stock pipeline's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from diffusers.pipelines.ltx import pipeline_ltx_condition as module
from PIL import Image
from stock_run import CLOSE, PROMPTS

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.plan.architecture import find_architecture
from sage_grpo.samplers.kernels import Ode, SageExact
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.types import Placed

KIND = "ltx_condition"
FORMAT = {"frames": 33, "height": 32, "width": 64}


def frames(count: int, seed: int = 0) -> torch.Tensor:
    return torch.stack([tiny.image(seed + number, 48, 80) for number in range(count)])


CASES = {
    "a picture first": [Placed(frames(1))],
    "a clip first": [Placed(frames(11))],
    "a picture in the middle": [Placed(frames(1), 12)],
    "a clip in the middle": [Placed(frames(30), 8)],
    "several": [Placed(frames(1, 50)), Placed(frames(9, 60), 16), Placed(frames(1, 70), 32)],
}


def stock(folder, ours, x: torch.Tensor, given) -> torch.Tensor:
    """The pipeline's latents from the noise x, with the means of what its VAE says of pictures, to which it adds no noise. One clip at a time: it
    takes no more with conditions that stand beside a clip, nor with latents."""
    pipe = tiny.shared_pipeline(folder)
    conditions = []
    for one in given:
        shown = [Image.fromarray(frame.numpy()) for frame in one.frames]
        what = {"image": shown[0]} if len(shown) == 1 else {"video": shown}
        conditions.append(module.LTXVideoCondition(**what, frame_index=one.at))
    size = {"num_frames": FORMAT["frames"], "height": FORMAT["height"], "width": FORMAT["width"]}
    options = {**size, "frame_rate": ours.video.fps, "guidance_scale": 4.0, "num_inference_steps": 2}
    distribution = type(pipe.vae.encode(torch.zeros(1, 3, 1, 32, 64)).latent_dist)

    def sampled(prompt: str, row: torch.Tensor) -> torch.Tensor:
        def noise(shape, **kwargs):
            return row.clone() if tuple(shape) == tuple(row.shape) else torch.randn(shape)

        patch.setattr(module, "randn_tensor", noise)
        fixed = {"image_cond_noise_scale": 0.0, "output_type": "latent", "negative_prompt": "blurry"}
        return pipe(conditions=conditions, prompt=prompt, **fixed, **options).frames

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distribution, "sample", lambda self, generator=None: self.mode())
        return torch.cat([sampled(prompt, row[None]) for prompt, row in zip(PROMPTS, x)])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "a clip in the middle" else pytest.mark.slow) for case in CASES]
)
@pytest.mark.usefixtures("in_double")
def test_frames_that_are_given_are_the_pipelines(case: str, checkpoint, model) -> None:
    ours = model(KIND, guidance_scale=4.0, negative_prompt="blurry", train=False, **FORMAT)
    x, given = torch.randn(2, *ours.latent_shape()), CASES[case]
    conditions = [ours.abilities.encode_placed(prompt, given) for prompt in PROMPTS]
    y = integrate(Policy(ours, Ode(), Schedule(ours.sigmas(2))), x, conditions)
    torch.testing.assert_close(y, stock(checkpoint(KIND), ours, x, given), **CLOSE)
    moved = [replace(one, at=one.at + 8) for one in given[:1]]
    others = (ours.encode(PROMPTS), [ours.abilities.encode_placed(prompt, moved) for prompt in PROMPTS])
    with torch.no_grad():
        v, *changed = (ours.velocity(x, ours.sigmas(2)[1], one) for one in (conditions, *others))
    assert all((v - other).abs().max() > 1e-3 for other in changed)


def test_given_frames_stay_and_the_rest_is_learned(model) -> None:
    ours = model(KIND, guidance_scale=1.0, **FORMAT)
    conditions = [ours.abilities.encode_placed("a cat", CASES["several"]), *ours.encode(["a dog"])]
    x, sigma = torch.randn(2, *ours.latent_shape()), ours.sigmas(3)[1]
    with torch.no_grad():
        before = ours.velocity(x, sigma, conditions)
    v = ours.velocity(x, sigma, conditions)
    assert torch.equal(v.detach(), before)
    held, at = conditions[0].tensors["condition"], conditions[0].tensors["at"]
    assert at.tolist() == [0, 6]
    torch.testing.assert_close((x - sigma * v)[0][:, at], held)
    weights = list(ours.trainable().values())
    fixed = torch.autograd.grad(v[0][:, at].sum(), weights, retain_graph=True, allow_unused=True)
    assert all(one is None or not one.any() for one in fixed)
    assert any(one is not None and one.any() for one in torch.autograd.grad(v.sum(), weights, allow_unused=True))
    explored = Policy(ours, SageExact(), Schedule(ours.sigmas(3)))
    y = integrate(explored, x, conditions, lambda index: torch.randn_like(x))
    torch.testing.assert_close(y[0][:, at], held)


def test_a_checkpoint_that_names_the_older_pipeline_can_be_run_in_this_one(checkpoint, model, tmp_path) -> None:
    folder = tiny.variant(checkpoint(KIND), tmp_path / "ltx")
    index = json.loads((folder / "model_index.json").read_text())
    tiny.write(folder / "model_index.json", {**index, "_class_name": "LTXPipeline"})
    plain = ModelSpec(path=str(folder), cache=None, train=False, guidance_scale=1.0, **FORMAT)
    asked = replace(plain, options={"condition_pipeline": 1})
    named, ours, older = model(KIND, train=False, guidance_scale=1.0, **FORMAT), asked.load("cpu"), plain.load("cpu")
    x, sigma = torch.randn(1, *ours.latent_shape()), torch.tensor(0.6)
    one, other, third = (found.velocity(x, sigma, found.encode(["a cat"])) for found in (named, ours, older))
    assert torch.equal(one, other)
    assert not torch.equal(one, third)
    assert torch.equal(ours.sigmas(6), named.sigmas(6))
    assert torch.equal(find_architecture(asked).model.sigmas(6), named.sigmas(6))
    assert not torch.equal(find_architecture(plain).model.sigmas(6), named.sigmas(6))
    ours.save(tmp_path / "out", merged=True)
    assert "LTXConditionPipeline.from_pretrained(" in (tmp_path / "out" / "README.md").read_text()


def test_what_does_not_fit_is_refused(model) -> None:
    ours = model(KIND, train=False, **FORMAT)
    for given, message in (
        (Placed(frames(1), 33), "frame 33 is outside of a clip of 33 frames"),
        (Placed(frames(1), -1), "frame -1 is outside"),
        (Placed(frames(4), 8), "begins at frame 8 needs 5 frames there, as in the pipeline, and has 4"),
        (Placed(frames(20), 32), "and has 1: give a picture"),
    ):
        with pytest.raises(ModelError, match=message):
            ours.abilities.encode_placed("a cat", [given])
    assert not any(model(kind, train=False).abilities.encode_placed for kind in ("ltx", "wan_t2v"))
    with pytest.raises(ModelError, match="leave last_image out"):
        ours.encode(["a cat"], [torch.stack([tiny.image()] * 2)])
    with pytest.raises(ModelError, match="guidance_rescale is for clips from text"):
        model(KIND, train=False, options={"guidance_rescale": 0.5}).encode(["a cat"], [tiny.image()])
    with pytest.raises(ModelError, match="at least 1, got 0"):
        ours.sigmas(0)
    torch.testing.assert_close(ours.sigmas(6, 3.0), 3 * ours.sigmas(6) / (1 + 2 * ours.sigmas(6)))
