"""LTX-2 is its stock pipeline: grid, both parts of its latents, pixels and sound; it can be trained and saved."""

from __future__ import annotations

import inspect
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from stock_run import CLOSE, NEGATIVE, PROMPTS, assert_same_pixels, fields_of, start
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.base import StateParts, abilities
from sage_grpo.models.families.ltx2 import Ltx2, mel_bands
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.types import Sound

SIZE = {"height": 32, "width": 64}
PICTURE = {"guidance_rescale": 0.6, "stg_scale": 0.8, "modality_scale": 2.0}
AUDIO = {"guidance_scale": 5.0, "guidance_rescale": 0.3, "stg_scale": 1.4, "modality_scale": 2.5}
ALL = {**PICTURE, "stg_block": 1, **{f"audio_{name}": value for name, value in AUDIO.items()}}
ONE = {"stg_block": 1, "guidance_rescale": 0.0, "modality_scale": 1.0, "audio_stg_scale": 0.0, "stg_scale": 0.5}
"""Terms of one part alone, and one (0) whose sound has the picture's."""
OFF = {"guidance_rescale": 0.0, "stg_scale": 0.0, "modality_scale": 1.0}
PLAIN = {**OFF, "audio_guidance_scale": 1.0, **{f"audio_{name}": value for name, value in OFF.items()}}


def stock(folder, ours, x: torch.Tensor, scale: float, options: dict, picture: torch.Tensor | None = None):
    pipe, seen = tiny.shared_pipeline(folder), []
    given = {name: value for name, value in options.items() if name not in ("stg_block", "image_crf")}
    if picture is not None:
        pipe = diffusers.LTX2ImageToVideoPipeline(**pipe.components)
        pipe.set_progress_bar_config(disable=True)
        given |= {"image": Image.fromarray(picture.numpy()), "image_crf": options.get("image_crf")}
    decode, noises = pipe.vae.decode, iter(ours.parts.split(x).values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe.vae, "decode", lambda z, *more, **how: seen.append(z) or decode(z, *more, **how))
        patch.setattr(f"{type(pipe).__module__}.randn_tensor", lambda *arguments, **kwargs: next(noises).clone())
        output = pipe(
            prompt=PROMPTS[: len(x)],
            negative_prompt=[NEGATIVE] * len(x),
            num_frames=5,
            frame_rate=8.0,
            num_inference_steps=2,
            guidance_scale=scale,
            spatio_temporal_guidance_blocks=[options.get("stg_block", 28)],
            output_type="pt",
            **SIZE,
            **given,
        )
    return pipe.scheduler.sigmas, seen[0], output.frames, output.audio


@pytest.mark.parametrize(
    ("kind", "scale", "options"),
    [
        pytest.param("ltx2_3", 3.0, ALL, id="all terms"),
        pytest.param("ltx2", 1.0, PLAIN, marks=pytest.mark.slow, id="plain"),
        pytest.param("ltx2_3", 3.0, ONE, marks=pytest.mark.slow, id="one term"),
    ],
)
@pytest.mark.usefixtures("in_double")
def test_ode_rollout_is_the_pipeline(kind: str, scale: float, options: dict, checkpoint, model) -> None:
    ours = model(kind, **fields_of(kind, scale), options=options)
    x = start(ours)
    sigmas, z, video, audio = stock(checkpoint(kind), ours, x, scale, options)
    torch.testing.assert_close(ours.sigmas(2), sigmas.float(), rtol=0, atol=1e-6)
    y = integrate(Policy(ours, Ode(), Schedule(ours.sigmas(2))), x, ours.encode(PROMPTS))
    torch.testing.assert_close(ours.codec.to_vae(y), z, **CLOSE)
    assert_same_pixels(ours.decode(y), video)
    torch.testing.assert_close(ours.codec.sound(y).waves, audio.float().clamp(-1, 1), rtol=0, atol=1e-4)
    assert ours.codec.sound(y).waves.std() > 1e-3
    if options == ALL:
        sound = abilities(ours).sound(y)
        assert abilities(ours).parts == ours.parts
        with pytest.raises(ModelError, match="Latents have shape"):
            ours.codec.sound(x[:, 1:])
        assert (ours.branches(0.5), ours.branches(0.5, guidance=1.0)) == (4, 1)
        assert abs(sound.waves.shape[-1] / sound.rate - ours.video.frames / ours.video.fps) < 0.1


@pytest.mark.parametrize("name", ["LTX2Pipeline", "LTX2ImageToVideoPipeline"])
def test_options_of_guidance_are_the_pipelines_with_its_defaults(name: str) -> None:
    arguments = inspect.signature(getattr(diffusers, name).__call__).parameters
    theirs = {key: one.default for key, one in arguments.items() if key.endswith(("_scale", "_rescale"))}
    theirs = {key: value for key, value in theirs.items() if not key.startswith(("guidance_scale", "noise", "decode"))}
    assert theirs.items() <= dict(Ltx2.traits.options).items()
    assert len(theirs) == 7


@pytest.mark.parametrize(
    ("kind", "crf"), [pytest.param("ltx2_3", None, marks=pytest.mark.slow), ("ltx2", 0)], ids=["compressed", "as it is"]
)
@pytest.mark.usefixtures("in_double")
def test_a_first_frame_is_the_pipelines(kind: str, crf: int | None, checkpoint, model) -> None:
    """With all of guidance, whose rescaling measures the clip with its first frame."""
    options = ALL | ({} if crf is None else {"image_crf": crf})
    ours = model(kind, **fields_of(kind, 3.0), options=options)
    picture, other = tiny.image(3, 48, 80), tiny.image(4, 48, 80)
    x = start(ours)[:1]
    _, z, _, audio = stock(checkpoint(kind), ours, x, 3.0, options, picture)
    policy = Policy(ours, Ode(), Schedule(ours.sigmas(2)))
    conditions = ours.encode(PROMPTS[:1], [picture])
    y = integrate(policy, x, conditions)
    torch.testing.assert_close(ours.codec.to_vae(y), z, **CLOSE)
    torch.testing.assert_close(ours.codec.sound(y).waves, audio.float().clamp(-1, 1), rtol=0, atol=1e-4)
    frame = conditions[0].tensors["condition"].to(y)
    torch.testing.assert_close(ours.parts.split(y)["video"][0, :, :1], frame, **CLOSE)
    changed = ours.parts.split(integrate(policy, x, ours.encode(PROMPTS[:1], [other])) - y)
    assert changed["video"][:, :, 1:].abs().max() > 1e-4
    assert changed["audio"].abs().max() > 1e-4


def test_parts_of_a_row() -> None:
    parts = StateParts({"video": (2, 3), "audio": (4,)})
    rows = torch.arange(20.0).reshape(2, 10)
    assert {name: part.shape for name, part in parts.split(rows).items()} == {"video": (2, 2, 3), "audio": (2, 4)}
    assert torch.equal(parts.join(parts.split(rows)), rows)
    parts.check(["audio", "video"])
    with pytest.raises(ModelError, match='no part "sound" here: the model has video, audio'):
        parts.check(["audio", "sound"])
    ours = SimpleNamespace(parts=parts, _by_part=lambda name: {"video": 0.0, "audio": 0.5})
    moved = parts.split(Ltx2._rescaled(ours, rows, torch.tensor(0.5), rows.cos(), rows.sin()) - rows.cos())
    assert [bool(moved[name].abs().max() > 1e-3) for name in parts.shapes] == [False, True], "a share of one part alone"


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


@pytest.mark.parametrize("kind", ["ltx2", pytest.param("ltx2_3", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("in_double")
def test_latents_of_clips_are_both_vaes_own_once_scaled(kind: str, model, checkpoint, monkeypatch) -> None:
    ours, pipe = model(kind, train=False, **SIZE), tiny.shared_pipeline(checkpoint(kind))
    clips = torch.stack([torch.stack([tiny.image(10 * row + frame, 32, 64) for frame in range(5)]) for row in range(2)])
    waves = torch.cat([tone(1.0, ours.codec.sound_rate, pitch) for pitch in (100.0, 300.0)])  # longer than the clip
    latents = ours.codec.to_latents(clips, Sound(waves, ours.codec.sound_rate))
    parts, vae, audio_vae = ours.parts.split(latents), pipe.vae, pipe.audio_vae
    pixels = (clips.to(torch.float32) / 127.5 - 1).permute(0, 4, 1, 2, 3)
    z = pipe._denormalize_latents(parts["video"], vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    with torch.no_grad():
        torch.testing.assert_close(z, vae.encode(pixels).latent_dist.mode(), **CLOSE)
        samples = round(5 / ours.video.fps * ours.codec.sound_rate)
        config = audio_vae.config
        bands = mel_bands(waves[..., :samples], ours.codec.sound_rate, config.mel_hop_length, config.mel_bins)
        wanted = audio_vae.encode(bands).latent_dist.mode()
    packed = pipe._pack_audio_latents(parts["audio"])
    packed = pipe._denormalize_audio_latents(packed, audio_vae.latents_mean, audio_vae.latents_std)
    heard = pipe._unpack_audio_latents(packed, parts["audio"].shape[2], num_mel_bins=parts["audio"].shape[3])
    torch.testing.assert_close(heard, wanted[:, :, : heard.shape[2]], **CLOSE)
    assert wanted.shape[2] - heard.shape[2] in (0, 1)
    silent = ours.parts.split(ours.codec.to_latents(clips))
    assert torch.equal(silent["video"], parts["video"])
    assert (silent["audio"] - parts["audio"]).abs().max() > 1e-3
    short = waves[:, :1, : samples // 2]  # of one channel, and too short: silence follows
    whole = torch.cat([short, torch.zeros(2, 1, samples - samples // 2)], dim=-1).repeat(1, 2, 1)
    made = (ours.codec.to_latents(clips, Sound(one, ours.codec.sound_rate)) for one in (short, whole))
    torch.testing.assert_close(*made, **CLOSE)
    monkeypatch.setattr(ours.pipe.vocoder, "forward", lambda bands: torch.tensor([[[-3.0, 0.5, 3.0]]]))
    assert ours.codec.sound(latents).waves.tolist() == [[[-1.0, 0.5, 1.0]]] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("in_double")
def test_upsampled_clips_are_the_pipelines(checkpoint, tmp_path) -> None:
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    folder = tmp_path / "ltx2"
    shutil.copytree(checkpoint("ltx2"), folder)
    spec = ModelSpec(path=str(folder), cache=None, train=False, options={"upsample": 1}, **SIZE)
    with pytest.raises(ModelError, match=r"has no latent_upsampler\. Download that folder"):
        spec.load("cpu")
    torch.manual_seed(0)
    upsampler = LTX2LatentUpsamplerModel(in_channels=8, mid_channels=32, num_blocks_per_stage=1)
    upsampler.save_pretrained(folder / "latent_upsampler")
    with pytest.raises(ModelError, match=r"upsample enlarges finished clips.*Leave it out"):
        replace(spec, train=True).load("cpu")
    ours = spec.load("cpu")
    x = torch.randn(2, *ours.latent_shape())
    assert ours.upsampler in ours.modules("vae")
    pipe = diffusers.LTX2LatentUpsamplePipeline(ours.pipe.vae, ours.upsampler.double())
    latents = ours.parts.split(x)["video"]
    frames = pipe(latents=latents, latents_normalized=True, num_frames=5, output_type="pt", **SIZE).frames
    clips = ours.decode(x)
    assert clips.shape == (2, 5, 64, 128, 3)
    assert (clips.double() / 255 - frames.permute(0, 1, 3, 4, 2)).abs().max() <= 0.5 / 255 + 1e-9
    assert ours.codec.sound(x).waves.shape == replace(spec, options={}).load("cpu").codec.sound(x).waves.shape
