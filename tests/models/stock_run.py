"""A stock pipeline that runs as its users run it, and what its parts were given; the same clips as ours, from the same noise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import double
import tiny

PROMPTS = ["a cat", 'a dog holds a sign "hi" and runs']
LONG = [PROMPTS[0], PROMPTS[1] + " ".join(map(str, range(400)))]
"""The second is 1,500 bytes, each of them a token: more than any pipeline's call reads, though its own encoding may allow them."""
NEGATIVE = "blurry"
CLOSE = {"rtol": double.CLOSE, "atol": double.CLOSE}
SLOW = pytest.mark.slow
PICTURE, LAST = tiny.image(3, 48, 80), tiny.image(4, 48, 80)
TRUE_CFG = ("flux_plain", "qwen_image")
"""Pipelines that call classifier-free guidance so, beside the scale that is an input."""
PACKED = ("ltx", "flux", "qwen_image")
UNTOLD = ("flux", "flux2", "flux2_distilled")
"""Pipelines without a negative prompt of the user's."""


def slow(*kinds: str) -> list:
    return [pytest.param(kind, marks=SLOW) for kind in kinds]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def start(ours) -> torch.Tensor:
    """The noise that two clips start from."""
    return torch.randn(2, *ours.latent_shape(), generator=seeded())


def size_of(kind: str) -> dict[str, int]:
    """Not square, so that rows that are taken for columns are seen; HunyuanVideo-1.5 derives its size from the picture's shape, and LTX-Video
    takes multiples of 32."""
    if kind == "hunyuan15_i2v":
        return {"height": 24, "width": 40}
    return {"height": 32, "width": 64 if kind.startswith("ltx") else 48}


def fields_of(kind: str, scale: float | None) -> dict:
    negative = "" if kind.startswith("flux2") else NEGATIVE
    return {"train": False, "negative_prompt": negative, "guidance_scale": scale, **size_of(kind)}


def conditions_of(ours, kind: str, prompts: list[str]) -> list:
    if kind == "wan_flf2v":
        return ours.encode(prompts, [torch.stack([PICTURE, LAST])] * len(prompts))
    return ours.encode(prompts, [PICTURE] * len(prompts) if kind.endswith("i2v") else None)


def call_of(kind: str, scale: float | None, count: int) -> dict:
    call = {} if kind == "hunyuan15_i2v" else size_of(kind)
    if kind not in tiny.IMAGES:
        call["num_frames"] = 5
    if kind.startswith("ltx"):
        call["frame_rate"] = 8
    if kind.endswith(("i2v", "flf2v")):
        call["image"] = Image.fromarray(PICTURE.numpy())
    if kind == "wan_flf2v":
        call["last_image"] = Image.fromarray(LAST.numpy())
    if kind == "flux_plain":
        call["max_sequence_length"] = 256  # as schnell's authors call it
    if scale is not None and not kind.startswith("hunyuan15"):
        # Z-Image counts from the prompt's own velocity.
        call["true_cfg_scale" if kind in TRUE_CFG else "guidance_scale"] = scale - (kind == "z_image")
    if kind not in UNTOLD:
        call["negative_prompt"] = [NEGATIVE] * count
    return call


def packed_by(pipe, kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind.startswith("ltx"):
        return pipe._pack_latents(x)
    flat = x[:, :, 0]
    if kind.startswith("flux2"):
        return flat  # it packs them itself
    return pipe._pack_latents(flat, *flat.shape) if kind.startswith(PACKED) else flat if kind in tiny.IMAGES else x


def unpacked_by(pipe, kind: str, latents: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if kind.startswith("ltx"):
        return pipe._unpack_latents(latents, *x.shape[2:])
    if kind.startswith("flux2"):
        return latents.permute(0, 2, 1).reshape(x.shape)
    if kind.startswith(PACKED):
        latents = pipe._unpack_latents(latents, *size_of(kind).values(), pipe.vae_scale_factor)
    return latents.reshape(x.shape)


def stock(folder, kind: str, x: torch.Tensor, scale: float | None, prompts: list[str], steps: int = 3, **call):
    """The pipeline's grid, its last latents, what its VAE was given, and its video; `scale` None leaves guidance to the checkpoint."""
    pipe, seen = tiny.shared_pipeline(folder), {}
    decode, step, prepare = pipe.vae.decode, pipe.scheduler.step, pipe.prepare_latents
    if kind.startswith("hunyuan15"):
        pipe.vae.enable_slicing()  # the stock VAE crashes for batches
        if scale is not None:
            pipe.guider.guidance_scale = scale
        # Less padding than the 1,985 tokens of the real thing: test_packed has those.
        pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 60, 40, 9

    def spy_decode(z, *arguments, **kwargs):
        seen["z"] = z
        return decode(z, *arguments, **kwargs)

    def spy_step(*arguments, **kwargs):
        seen["latents"] = step(*arguments, **kwargs)[0]
        return (seen["latents"],)

    def spy_prepare(*arguments, **kwargs):
        seen["prepared"] = prepare(*arguments, **kwargs)
        return seen["prepared"]

    options = {**call_of(kind, scale, len(prompts)), "num_inference_steps": steps, "output_type": "pt", **call}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe.vae, "decode", spy_decode)
        patch.setattr(pipe.scheduler, "step", spy_step)
        patch.setattr(pipe, "prepare_latents", spy_prepare)
        output = pipe(prompt=list(prompts), latents=packed_by(pipe, kind, x), **options)
    latents = unpacked_by(pipe, kind, seen["latents"], x)
    if kind == "wan22_5b_i2v":  # after its last step this pipeline puts the image in the first frame
        latents = torch.cat([seen["prepared"][1].expand(len(x), -1, -1, -1, -1), latents[:, :, 1:]], dim=2)
    video = output.images[:, None] if kind in tiny.IMAGES else output.frames
    return SimpleNamespace(sigmas=pipe.scheduler.sigmas, latents=latents, z=seen["z"], video=video)


def assert_same_pixels(clips: torch.Tensor, video: torch.Tensor) -> None:
    """But for ties in rounding."""
    expected = (video.permute(0, 1, 3, 4, 2) * 255).round().to(torch.uint8)
    assert clips.shape == expected.shape
    off = (clips.int() - expected.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 2e-3
