"""LTX-2 is its stock pipeline: grid, both parts of its latents, pixels and sound; it can be trained and saved."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import diffusers
import pytest
import torch
from PIL import Image
from stock_run import CLOSE, NEGATIVE, PROMPTS, assert_same_pixels, fields_of, start

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.base import StateParts, abilities
from sage_grpo.models.families.ltx2 import Ltx2
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.schedule import Schedule

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
        assert abilities(ours).encoder is None
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
