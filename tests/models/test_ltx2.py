"""LTX-2 is its stock pipeline: grid, both parts of its latents, pixels and sound; it can be trained and saved."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

import double
import tiny
from sage_grpo.flow.kernels import Ode, Sage
from sage_grpo.flow.schedule import Schedule
from sage_grpo.models import ModelError
from sage_grpo.models.families.ltx2 import mel_bands
from sage_grpo.models.parts import HasParts, Parts, Sounds
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.types import Sound

PROMPTS = ["a cat", "a dog barks at the sea"]
NEGATIVE = "blurry"
SIZE = {"height": 32, "width": 64}
CLOSE = {"rtol": double.CLOSE, "atol": double.CLOSE}
ALL = {"audio_guidance_scale": 5.0, "guidance_rescale": 0.6, "stg_scale": 0.8, "stg_block": 1, "modality_scale": 2.0}
PLAIN = {"audio_guidance_scale": 1.0, "guidance_rescale": 0.0, "stg_scale": 0.0, "modality_scale": 1.0}


def stock(folder, ours, x: torch.Tensor, scale: float, options: dict, **call):
    """The pipeline's last latents as a row, its grid, its pixels and its sound."""
    pipe, seen = tiny.shared_pipeline(folder), {}
    decode, audio_decode = pipe.vae.decode, pipe.audio_vae.decode
    parts = ours.parts.split(x)
    kwargs = {name: value for name, value in options.items() if name != "stg_block"}
    kwargs |= {f"audio_{name}": value for name, value in kwargs.items() if not name.startswith("audio")}

    def spy(name, function):
        def call(z, *arguments, **more):
            seen[name] = z
            return function(z, *arguments, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe.vae, "decode", spy("video", decode))
        patch.setattr(pipe.audio_vae, "decode", spy("audio", audio_decode))
        output = pipe(
            prompt=PROMPTS,
            negative_prompt=[NEGATIVE] * 2,
            num_frames=5,
            frame_rate=8.0,
            num_inference_steps=3,
            guidance_scale=scale,
            spatio_temporal_guidance_blocks=[options.get("stg_block", 28)],
            latents=pipe._pack_latents(parts["video"]),
            # The pipeline takes the sound's noise for a clean latent and scales it.
            audio_latents=scaled(pipe, parts["audio"]),
            output_type="pt",
            **SIZE,
            **{**kwargs, **call},
        )
    return pipe.scheduler.sigmas, seen, output.frames, output.audio


def scaled(pipe, audio: torch.Tensor) -> torch.Tensor:
    packed = pipe._pack_audio_latents(audio)
    return pipe._denormalize_audio_latents(packed, pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std)


def loaded(model, kind: str, scale: float, options: dict):
    return model(kind, guidance_scale=scale, negative_prompt=NEGATIVE, train=False, options=options, **SIZE)


@pytest.mark.parametrize(
    ("kind", "scale", "options"),
    [("ltx2_3", 3.0, ALL), pytest.param("ltx2", 3.0, ALL, marks=pytest.mark.slow), ("ltx2", 1.0, PLAIN)],
)
@pytest.mark.usefixtures("in_double")
def test_ode_rollout_is_the_pipeline(kind: str, scale: float, options: dict, checkpoint, model) -> None:
    ours = loaded(model, kind, scale, options)
    x = torch.randn(2, *ours.latent_shape(), generator=torch.Generator().manual_seed(7))
    sigmas, seen, video, audio = stock(checkpoint(kind), ours, x, scale, options)
    torch.testing.assert_close(ours.sigmas(3), sigmas.float(), rtol=0, atol=1e-6)

    conditions = ours.encode(PROMPTS)
    policy = Policy(ours, Ode(), Schedule(ours.sigmas(3)))
    y = integrate(policy, x, conditions)
    torch.testing.assert_close(ours._to_vae(y), seen["video"], **CLOSE)
    clips = ours.decode(y)
    expected = (video.permute(0, 1, 3, 4, 2) * 255).round().to(torch.uint8)
    assert (clips.int() - expected.int()).abs().max() <= 1
    torch.testing.assert_close(ours.sound(y), audio.float().clamp(-1, 1), rtol=0, atol=1e-4)
    assert ours.sound(y).std() > 1e-3
    if scale != 1:
        for change in ({"audio_guidance_scale": 2.0}, {"modality_scale": 1.5}, {"guidance_rescale": 0.0}):
            other = loaded(model, kind, scale, {**options, **change})
            assert (integrate(Policy(other, Ode(), policy.schedule), x, conditions) - y).abs().max() > 1e-4, change


@pytest.mark.slow
@pytest.mark.usefixtures("in_double")
def test_distilled_sigmas_are_the_pipelines(checkpoint, model) -> None:
    """As its authors run distilled checkpoints: without guidance, on sigmas that they state and that no shift bends."""
    from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES

    ours = model("ltx2", guidance_scale=1.0, train=False, sigmas=list(DISTILLED_SIGMA_VALUES), options=PLAIN, **SIZE)
    x = torch.randn(2, *ours.latent_shape(), generator=torch.Generator().manual_seed(7))
    pipe = tiny.shared_pipeline(checkpoint("ltx2"))
    plain = type(pipe.scheduler).from_config(pipe.scheduler.config, use_dynamic_shifting=False, shift_terminal=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe, "scheduler", plain)
        sigmas, seen, _, _ = stock(checkpoint("ltx2"), ours, x, 1.0, PLAIN, sigmas=DISTILLED_SIGMA_VALUES)
    torch.testing.assert_close(ours.sigmas(8), sigmas.float(), rtol=0, atol=1e-6)
    y = integrate(Policy(ours, Ode(), Schedule(ours.sigmas(8))), x, ours.encode(PROMPTS))
    torch.testing.assert_close(ours._to_vae(y), seen["video"], **CLOSE)


@pytest.mark.parametrize(
    ("kind", "crf"), [("ltx2_3", None), pytest.param("ltx2", 0, marks=pytest.mark.slow)], ids=["compressed", "as it is"]
)
@pytest.mark.usefixtures("in_double")
def test_a_first_frame_is_the_pipelines(kind: str, crf: int | None, checkpoint, model) -> None:
    """With all of guidance, whose rescaling measures the clip with its first frame."""
    ours = loaded(model, kind, 3.0, ALL | ({} if crf is None else {"image_crf": crf}))
    picture, other = tiny.image(3, 48, 80), tiny.image(4, 48, 80)
    x = torch.randn(1, *ours.latent_shape(), generator=torch.Generator().manual_seed(7))
    parts, pipe = (
        ours.parts.split(x),
        diffusers.LTX2ImageToVideoPipeline(**tiny.shared_pipeline(checkpoint(kind)).components),
    )
    pipe.set_progress_bar_config(disable=True)
    noises = iter([parts["video"], parts["audio"]])
    scales = {name: value for name, value in ALL.items() if name != "stg_block"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{type(pipe).__module__}.randn_tensor", lambda *arguments, **kwargs: next(noises).clone())
        video, audio = pipe(
            image=Image.fromarray(picture.numpy()),
            prompt=PROMPTS[:1],
            negative_prompt=[NEGATIVE],
            num_frames=5,
            frame_rate=8.0,
            num_inference_steps=3,
            guidance_scale=3.0,
            spatio_temporal_guidance_blocks=[ALL["stg_block"]],
            image_crf=crf,
            output_type="latent",
            return_dict=False,
            **SIZE,
            **scales,
            **{f"audio_{name}": value for name, value in scales.items() if not name.startswith("audio")},
        )
    policy = Policy(ours, Ode(), Schedule(ours.sigmas(3)))
    conditions = ours.encode(PROMPTS[:1], [picture])
    y = integrate(policy, x, conditions)
    torch.testing.assert_close(ours._to_vae(y), video, **CLOSE)
    sound = pipe._denormalize_audio_latents(
        pipe._pack_audio_latents(ours.parts.split(y)["audio"]), pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std
    )
    torch.testing.assert_close(pipe._unpack_audio_latents(sound, *audio.shape[2:]), audio, **CLOSE)
    frame = conditions[0].tensors["condition"].to(y)
    torch.testing.assert_close(ours.parts.split(y)["video"][0, :, :1], frame, **CLOSE)
    changed = ours.parts.split(integrate(policy, x, ours.encode(PROMPTS[:1], [other])) - y)
    assert changed["video"][:, :, 1:].abs().max() > 1e-4
    assert changed["audio"].abs().max() > 1e-4


@pytest.mark.slow
def test_a_batch_may_have_a_picture_in_one_of_its_rows(model) -> None:
    ours = loaded(model, "ltx2_3", 3.0, ALL)
    x, sigma = torch.randn(2, *ours.latent_shape()), torch.tensor(0.7)
    conditions = ours.encode(PROMPTS, [None, tiny.image(3)])
    with torch.no_grad():
        together = ours.velocity(x, sigma, conditions)
        alone = [ours.velocity(x[row : row + 1], sigma, conditions[row : row + 1]) for row in range(2)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_parts_of_a_row() -> None:
    parts = Parts({"video": (2, 3), "audio": (4,)})
    rows = torch.arange(20.0).reshape(2, 10)
    assert {name: part.shape for name, part in parts.split(rows).items()} == {"video": (2, 2, 3), "audio": (2, 4)}
    assert torch.equal(parts.join(parts.split(rows)), rows)
    parts.check(["audio", "video"])
    with pytest.raises(ModelError, match='no part "sound" here: the model has video, audio'):
        parts.check(["audio", "sound"])


def test_it_has_parts_and_a_sound(model) -> None:
    ours = loaded(model, "ltx2_3", 3.0, ALL)
    assert isinstance(ours, HasParts)
    assert isinstance(ours, Sounds)
    assert ours.branches(0.5) == 4
    assert ours.branches(0.5, guidance=1.0) == 1
    x = torch.randn(1, *ours.latent_shape())
    seconds = ours.sound(x).shape[-1] / ours.sound_rate
    assert abs(seconds - ours.video.frames / ours.video.fps) < 0.1


def test_replay_is_exact_and_every_part_reaches_the_adapter(fresh_model) -> None:
    ours = fresh_model("ltx2_3", lora=LoraSpec(rank=2), train=True, guidance_scale=1.0, **SIZE)
    policy = Policy(ours, Sage(0.5), Schedule(ours.sigmas(3)))
    conditions = ours.encode(PROMPTS)
    x = torch.randn(2, *ours.latent_shape())
    with torch.no_grad():
        before = policy.step(1, x, conditions)
    again = policy.step(1, x, conditions)
    assert torch.equal(before.velocity, again.velocity)
    for name, part in ours.parts.split(again.velocity).items():
        grads = torch.autograd.grad(
            part.square().sum(), list(ours.trainable().values()), retain_graph=True, allow_unused=True
        )
        assert any(grad is not None and grad.abs().sum() > 0 for grad in grads), name


@pytest.mark.parametrize("lora", [None, pytest.param(LoraSpec(rank=2), marks=pytest.mark.slow)], ids=["full", "lora"])
def test_saved_weights_load_in_diffusers(lora, checkpoint, fresh_model, tmp_path) -> None:
    ours = fresh_model("ltx2", lora=lora, train=True, guidance_scale=1.0, **SIZE)
    with torch.no_grad():
        for parameter in ours.trainable().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    ours.save(tmp_path / "out")
    pipe = tiny.pipeline(checkpoint("ltx2") if lora else tmp_path / "out")
    if lora:
        pipe.load_lora_weights(tmp_path / "out")
    assert isinstance(pipe, diffusers.LTX2Pipeline)
    other = type(ours).__new__(type(ours))
    other.__dict__.update(ours.__dict__)
    other.network = pipe.transformer.eval()
    x, conditions = torch.randn(2, *ours.latent_shape()), ours.encode(PROMPTS)
    sigma = torch.tensor(0.7)
    with torch.no_grad():
        torch.testing.assert_close(
            other.velocity(x, sigma, conditions), ours.velocity(x, sigma, conditions), rtol=1e-4, atol=1e-5
        )


def test_what_it_cannot_run_is_refused_with_guidance_as_without(model) -> None:
    for scale in (1.0, 3.0):
        ours = loaded(model, "ltx2", scale, {})
        conditions = ours.encode(PROMPTS)
        with pytest.raises(ModelError, match="Latents have shape"):
            ours.velocity(torch.zeros(2, 7), torch.tensor(0.5), conditions)
        with pytest.raises(ModelError, match="2 samples but 1 conditions"):
            ours.velocity(torch.zeros(2, *ours.latent_shape()), torch.tensor(0.5), conditions[:1])


def tone(seconds: float, rate: int, pitch: float, channels: int = 2) -> torch.Tensor:
    """One clip's sound: a sine in every channel, each louder than the one before."""
    times = torch.arange(round(seconds * rate)) / rate
    return torch.stack([0.2 * (one + 1) * torch.sin(2 * torch.pi * pitch * times) for one in range(channels)])[None]


@pytest.mark.usefixtures("in_double")
def test_bands_of_a_sound_are_those_of_another_library() -> None:
    waves = tone(0.5, 16000, 440.0) + 0.01 * torch.randn(1, 2, 8000)
    bands = mel_bands(waves, 16000, 160, 64)
    filters = mel_filter_bank(513, 64, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    settings = {"frame_length": 1024, "hop_length": 160, "power": 1.0, "mel_floor": 1e-5, "dtype": np.float64}
    for channel, wave in enumerate(waves[0].numpy()):
        wanted = spectrogram(wave, window_function(1024, "hann"), mel_filters=filters, log_mel="log", **settings)
        torch.testing.assert_close(bands[0, channel], torch.from_numpy(wanted.T), rtol=1e-6, atol=1e-6)
    assert bands.shape == (1, 2, 51, 64)
    assert mel_bands(torch.zeros(1, 2, 8000), 16000, 160, 64).unique().tolist() == pytest.approx([math.log(1e-5)])


@pytest.mark.parametrize("kind", ["ltx2", "ltx2_3"])
@pytest.mark.usefixtures("in_double")
def test_latents_of_clips_are_both_vaes_own_once_scaled(kind: str, model, checkpoint) -> None:
    ours, pipe = model(kind, train=False, **SIZE), tiny.shared_pipeline(checkpoint(kind))
    clips = torch.stack([torch.stack([tiny.image(10 * row + frame, 32, 64) for frame in range(5)]) for row in range(2)])
    waves = torch.cat([tone(1.0, ours.heard_rate, pitch) for pitch in (100.0, 300.0)])  # longer than the clip
    latents = ours.to_latents(clips, Sound(waves, ours.heard_rate))
    parts, vae, audio_vae = ours.parts.split(latents), pipe.vae, pipe.audio_vae
    pixels = (clips.to(torch.float32) / 127.5 - 1).permute(0, 4, 1, 2, 3)
    z = pipe._denormalize_latents(parts["video"], vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    with torch.no_grad():
        torch.testing.assert_close(z, vae.encode(pixels).latent_dist.mode(), **CLOSE)
        samples = round(5 / ours.video.fps * ours.heard_rate)
        bands = mel_bands(
            waves[..., :samples], ours.heard_rate, audio_vae.config.mel_hop_length, audio_vae.config.mel_bins
        )
        wanted = audio_vae.encode(bands).latent_dist.mode()
    packed = pipe._pack_audio_latents(parts["audio"])
    packed = pipe._denormalize_audio_latents(packed, audio_vae.latents_mean, audio_vae.latents_std)
    heard = pipe._unpack_audio_latents(packed, parts["audio"].shape[2], num_mel_bins=parts["audio"].shape[3])
    torch.testing.assert_close(heard, wanted[:, :, : heard.shape[2]], **CLOSE)
    assert wanted.shape[2] - heard.shape[2] in (0, 1)
    silent = ours.parts.split(ours.to_latents(clips))
    assert torch.equal(silent["video"], parts["video"])
    assert (silent["audio"] - parts["audio"]).abs().max() > 1e-3
    mono = Sound(waves[:, :1, : samples // 2], ours.heard_rate)  # of one channel, and too short: silence follows
    assert ours.to_latents(clips, mono).shape == latents.shape


@pytest.mark.usefixtures("in_double")
def test_upsampled_clips_are_the_pipelines(checkpoint, tmp_path) -> None:
    """A folder that has the network enlarges what it decodes as LTX2LatentUpsamplePipeline does, and only where nothing is trained."""
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    folder = tmp_path / "ltx2"
    shutil.copytree(checkpoint("ltx2"), folder)
    spec = ModelSpec(path=str(folder), cache=None, train=False, options={"upsample": 1}, **SIZE)
    with pytest.raises(ModelError, match=r"has no latent_upsampler\. Download that folder"):
        spec.load("cpu")
    torch.manual_seed(0)
    LTX2LatentUpsamplerModel(in_channels=8, mid_channels=32, num_blocks_per_stage=1).save_pretrained(
        folder / "latent_upsampler"
    )
    with pytest.raises(ModelError, match=r"upsample enlarges finished clips.*Leave it out"):
        replace(spec, train=True).load("cpu")
    ours = spec.load("cpu")
    x = torch.randn(2, *ours.latent_shape())
    assert ours._upsampler in ours._modules("vae")
    pipe = diffusers.LTX2LatentUpsamplePipeline(ours.pipe.vae, ours._upsampler.double())
    latents = ours.parts.split(x)["video"]
    frames = pipe(latents=latents, latents_normalized=True, num_frames=5, output_type="pt", **SIZE).frames
    clips = ours.decode(x)
    assert clips.shape == (2, 5, 64, 128, 3)
    assert (clips.double() / 255 - frames.permute(0, 1, 3, 4, 2)).abs().max() <= 0.5 / 255 + 1e-9
    assert ours.sound(x).shape == replace(spec, options={}).load("cpu").sound(x).shape
