"""Families: what starts from pictures is its stock pipeline, as test_parity.py has it of what starts from text; all can be trained and saved."""

from __future__ import annotations

import inspect
from importlib import import_module

import diffusers
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module
from PIL import Image
from stock_run import CLOSE, NEGATIVE, assert_same_pixels, call_of, fields_of, seeded, size_of, slow, start, stock

import tiny
from sage_grpo.models import ModelError, spec
from sage_grpo.models.families import ltx
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.policy import Policy, build_solver, integrate, solve
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.samplers.kernels import Ode, Sage
from sage_grpo.samplers.schedule import Schedule

SHORT = ["a cat", "a dog runs"]
SMALL = {"qwen_image_edit": {"options": {"picture_pixels": 64 * 64}, "height": 32, "width": 48}}
LEARN = (
    *("ltx", "flux", "flux2", "sd3", "qwen_image", "z_image"),
    *("wan_i2v", "hunyuan15_t2v", "ltx2_3", "qwen_image_edit"),
)


def conditions_of(ours, count: int) -> list:
    """Of prompts of two lengths, with pictures of two shapes where a model needs them."""
    pictures = [tiny.image(row, 40, 80 - 16 * row) for row in range(count)] if 0 not in ours.pictures else None
    return ours.encode([*SHORT, SHORT[0]][:count], pictures)


@pytest.mark.usefixtures("in_double")
def test_a_first_frame_is_the_pipelines(checkpoint, model) -> None:
    """LTX-Video from a picture as in the stock pipeline, but that the mean is taken where it draws the picture's latents."""
    kind = "ltx"
    ours = model(kind, **fields_of(kind, 4.0))
    picture, other = tiny.image(3, 48, 80), tiny.image(4, 48, 80)
    x, pipe = start(ours), tiny.shared_pipeline(checkpoint(kind))
    conditions = ours.encode(SHORT, [picture] * 2)
    options = {**call_of(kind, 4.0, 2), "prompt": SHORT, "num_inference_steps": 3, "output_type": "latent"}
    options["image"] = [Image.fromarray(picture.numpy())] * 2
    own = diffusers.LTXImageToVideoPipeline(**pipe.components)
    own.set_progress_bar_config(disable=True)
    distribution, drawn = type(pipe.vae.encode(torch.zeros(1, 3, 1, 32, 64)).latent_dist), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distribution, "sample", lambda self, generator=None: drawn.append(self) or self.mode())
        patch.setattr(f"{type(own).__module__}.randn_tensor", lambda *arguments, **kwargs: x.clone())
        latents = own(**options).frames
    assert drawn  # the pipeline draws, as docs/models.md has it
    latents = pipe._unpack_latents(latents, *x.shape[2:])
    policy = Policy(ours, Ode(), Schedule(ours.sigmas(3)))
    y = integrate(policy, x, conditions)
    frame = conditions[0].tensors["condition"].to(y)
    torch.testing.assert_close(y[:, :, :1], frame.expand(2, -1, -1, -1, -1), **CLOSE)
    torch.testing.assert_close(y, latents, **CLOSE)
    changed = integrate(policy, x, ours.encode(SHORT, [other] * 2))
    assert (y - changed)[:, :, 1:].abs().max() > 1e-4


@pytest.mark.usefixtures("in_double")
def test_a_changed_picture_is_the_pipelines(checkpoint, model, monkeypatch) -> None:
    kind, prompts = "qwen_image_edit", ["make it red", "add a dog"]
    ours = model(kind, guidance_scale=4.0, negative_prompt=NEGATIVE, train=False, **SMALL[kind])
    pipe, picture = tiny.pipeline(checkpoint(kind)), tiny.image(3, 40, 80)
    real = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: real(64 * 64, ratio))
    x = torch.randn(1, *ours.latent_shape(), generator=seeded())
    flat = x[:, :, 0]
    images = pipe(
        image=Image.fromarray(picture.numpy()),
        prompt=prompts[:1],
        negative_prompt=[NEGATIVE],
        true_cfg_scale=4.0,
        num_inference_steps=3,
        height=32,
        width=48,
        latents=pipe._pack_latents(flat, *flat.shape),
        output_type="latent",
    ).images
    monkeypatch.undo()
    square = ours.encode(prompts[:1], [tiny.image(5, 64, 64)])[0].tensors["condition"]
    assert ours.given_tokens == square.shape[-1] * square.shape[-2] // 4
    latents = pipe._unpack_latents(images, 32, 48, pipe.vae_scale_factor)
    torch.testing.assert_close(ours.sigmas(3), pipe.scheduler.sigmas.float(), rtol=0, atol=1e-6)
    policy = Policy(ours, Ode(), Schedule(ours.sigmas(3)))
    y = integrate(policy, x, ours.encode(prompts[:1], [picture]))
    torch.testing.assert_close(y, latents, **CLOSE)
    for prompt, image in ((prompts[1], picture), (prompts[0], tiny.image(4, 40, 80))):
        assert (integrate(policy, x, ours.encode([prompt], [image])) - y).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["sd3", "z_image", *slow(*(kind for kind in LEARN if kind not in ("sd3", "z_image")))])
def test_replay_gradients_and_what_blocks_keep(kind: str, model) -> None:
    ours = model(kind, guidance_scale=3.0, **SMALL.get(kind, {}))
    conditions, blocks = conditions_of(ours, 3), ours.blocks()
    assert len(blocks) == sum(len(getattr(ours.transformer, name)) for name in ours.traits.blocks) > 1
    policy = Policy(ours, Sage(0.5), Schedule(ours.sigmas(3)))
    x, gradients = torch.randn(3, *ours.latent_shape()), []
    with torch.no_grad():
        gaussian = policy.step(1, x, conditions).gaussian
        x_next = gaussian.sample(torch.randn(x.shape))
        before = gaussian.log_prob(x_next)
    for first, last in (("all", "all"), ("attention", "attention"), ("input", "input"), ("attention", "all")):
        ours.keep([first] * (len(blocks) - 1) + [last])
        ours.network.zero_grad()
        log_prob = policy.step(1, x, conditions).gaussian.log_prob(x_next)
        assert torch.equal(log_prob.detach(), before)
        log_prob.sum().backward()
        gradients.append({name: p.grad.clone() for name, p in ours.trainable().items() if p.grad is not None})
    ours.keep(["all"] * len(blocks))
    ours.network.zero_grad()
    assert gradients[0].keys() == ours.trainable().keys()
    assert not [name for name, gradient in gradients[0].items() if not gradient.any()]
    for other in gradients[1:]:
        assert all(torch.equal(gradients[0][name], other[name]) for name in other)


@pytest.mark.parametrize("kind", slow(*(kind for kind in LEARN if kind != "hunyuan15_t2v")))
def test_saved_weights_load_in_diffusers(kind: str, checkpoint, fresh_model, model, tmp_path) -> None:
    ours = fresh_model(kind, guidance_scale=1.0, lora=LoraSpec(rank=2, alpha=3.0), **SMALL.get(kind, {}))
    with torch.no_grad():
        for parameter in ours.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, conditions = torch.randn(2, *ours.latent_shape()), conditions_of(ours, 2)
    base = model(kind, guidance_scale=1.0, train=False, **SMALL.get(kind, {}))
    with torch.no_grad():
        v, plain = (m.velocity(x, torch.tensor(0.6), conditions) for m in (ours, base))
    assert (v - plain).abs().max() > 1e-3
    ours.save(tmp_path / "lora")
    ours.save(tmp_path / "whole", merged=True)
    own = {"cache": None, "train": False, "guidance_scale": 1.0, **SMALL.get(kind, {})}
    merged = ModelSpec(path=str(tmp_path / "whole"), **own).load("cpu")
    with torch.no_grad():
        torch.testing.assert_close(merged.velocity(x, torch.tensor(0.6), conditions), v, rtol=1e-4, atol=1e-5)
    tiny.pipeline(tmp_path / "whole")
    pipe = tiny.pipeline(checkpoint(kind))
    pipe.load_lora_weights(str(tmp_path / "lora"))
    adapted = dict(pipe.transformer.named_parameters())
    for name, parameter in ours.trainable().items():
        theirs = [p for other, p in adapted.items() if other.replace(".default_0.", ".default.") == name]
        assert len(theirs) == 1, name
        assert torch.equal(theirs[0], parameter)


def test_an_embedded_scale_needs_no_negative_prompt_and_one_pass(model, monkeypatch) -> None:
    ours = model("flux", train=False)
    assert ours.guidance_scale == 3.5
    conditions, calls = ours.encode(SHORT), []
    assert all(condition.negative is None for condition in conditions)
    forward = ours._forward
    monkeypatch.setattr(ours, "_forward", lambda *given: calls.append(given[-1]["guidance"]) or forward(*given))
    with torch.no_grad():
        ours.velocity(torch.randn(2, *ours.latent_shape()), torch.tensor(0.6), conditions)
    assert [call.tolist() for call in calls] == [[3.5, 3.5]]
    assert model("flux_plain", train=False).guidance_scale == 1.0


@pytest.mark.parametrize("name", [name for name in spec.FAMILIES if name != "hunyuan15"])
def test_defaults_are_those_of_the_pipelines_call(name: str) -> None:
    module = import_module(f"sage_grpo.models.families.{name}")
    kinds = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    scale = "true_cfg_scale" if name.startswith("qwen") else "guidance_scale"
    for traits in (kind.traits for kind in kinds if issubclass(kind, FamilyModel)):
        video, more = traits.video, name == "z_image"  # whose scale is counted from the prompt's own velocity
        own = {scale: traits.guidance_scale - more, "height": video.height, "width": video.width}
        own |= {"num_frames": video.frames, "frames": video.frames, "frame_rate": video.fps}
        for pipeline in traits.pipelines:
            call = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
            stated = {key: call[key].default for key in own.keys() & call.keys() if call[key].default is not None}
            assert stated.items() <= own.items(), pipeline


def test_the_shift_grows_with_the_number_of_tokens(fresh_model) -> None:
    shifts = [fresh_model("flux", train=False, height=size, width=size).shift for size in (8, 32)]
    assert shifts == pytest.approx([2.71828**0.9, 2.71828**2.0], rel=1e-4)  # 4 and 64 tokens: the ends of the line
    ours = fresh_model("flux", train=False, shift=5.0)
    torch.testing.assert_close(ours.sigmas(4), Schedule.shifted(4, 5.0).sigmas)
    torch.testing.assert_close(build_solver(ours, "checkpoint", 4)._scheduler.sigmas, ours.sigmas(4))
    own, given = (fresh_model("flux2", train=False, shift=shift) for shift in (None, 5.0))  # it goes by steps too
    torch.testing.assert_close(given.sigmas(4), Schedule.shifted(4, 5.0).sigmas)
    assert not torch.allclose(own.sigmas(4), given.sigmas(4), atol=1e-2)


@pytest.mark.usefixtures("in_double")
def test_ltx_options_reach_guidance_and_decoder(checkpoint, model) -> None:
    options = {"guidance_rescale": 0.7, "decode_timestep": 0.05, "decode_noise_scale": 0.0}
    kind, given = "ltx_timestep", fields_of("ltx_timestep", 4.0)
    ours, noisy = (model(kind, **given, options=one) for one in (options, {"decode_timestep": 0.4}))
    x = start(ours)
    run = stock(checkpoint(kind), kind, x, 4.0, SHORT, **options)
    y = solve(ours, build_solver(ours, "euler", 3), x, ours.encode(SHORT))
    torch.testing.assert_close(y, run.latents, **CLOSE)
    assert_same_pixels(ours.decode(run.latents), run.video)
    clips = noisy.decode(run.latents)
    assert (clips != model(kind, **given).decode(run.latents)).any()
    assert torch.equal(noisy.decode(run.latents), clips)  # the noise is the same each time


@pytest.mark.usefixtures("in_double")
def test_ltx_mixes_noise_into_latents_as_the_pipeline_given_the_same_generator(checkpoint, model) -> None:
    options = {"decode_timestep": 0.3, "decode_noise_scale": 0.4}
    ours = model("ltx_timestep", guidance_scale=1.0, train=False, options=options, **size_of("ltx_timestep"))
    given = {"generator": torch.Generator().manual_seed(ltx.MIXED), "negative_prompt": None, **options}
    run = stock(checkpoint("ltx_timestep"), "ltx_timestep", start(ours)[:1], 1.0, SHORT[:1], steps=2, **given)
    torch.testing.assert_close(ours.codec._decoder_inputs(ours.codec.to_vae(run.latents))[0], run.z, **CLOSE)
    assert_same_pixels(ours.decode(run.latents), run.video)


def test_z_images_padding_is_trained_where_tokens_are_filled_up(fresh_model) -> None:
    for width, filled in ((32, False), (40, True)):  # 64 tokens, and 80 of a multiple of 32
        names = fresh_model("z_image", guidance_scale=1.0, height=32, width=width).trainable()
        assert any("x_pad_token" in name for name in names) == filled


@pytest.mark.parametrize("kind", ["wan_t2v", "sd3", "flux2", *slow("hunyuan15_t2v", "ltx", "qwen_image")])
def test_latents_of_clips_are_the_vaes_own_once_scaled(kind: str, checkpoint) -> None:
    ours = ModelSpec(path=str(checkpoint(kind)), cache=None, vae_slicing=False, **size_of(kind)).load("cpu")
    video = ours.video
    shape = (2, video.frames, video.height, video.width, 3)
    clips = torch.randint(0, 256, shape, generator=seeded(), dtype=torch.uint8)
    latents = ours.codec.to_latents(clips)
    assert tuple(latents.shape) == (2, *ours.latent_shape())
    pixels = (clips.permute(0, 4, 1, 2, 3).float() / 127.5 - 1).split(1)
    with torch.no_grad():
        still = kind in tiny.IMAGES and kind != "qwen_image"
        own = [ours.pipe.vae.encode(one[:, :, 0] if still else one).latent_dist.mode() for one in pixels]
    z = torch.cat(own)[:, :, None] if still else torch.cat(own)
    torch.testing.assert_close(ours.codec.to_vae(latents), z, atol=1e-5, rtol=1e-4)
    assert ours.codec.key() == ours.codec.key()
    with pytest.raises(ModelError, match="Clips have shape"):
        ours.codec.to_latents(clips[:, :, :16])
