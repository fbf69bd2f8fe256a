"""Decoding in chunks of frames gives what the stock VAE gives at once, and leaves its modules as they were."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sage_grpo.models.devices import load_dtypes
from sage_grpo.models.network import decoding
from sage_grpo.models.network.decoding import hunyuan15_pixels, rms_norm, to_uint8, wan_pixels
from sage_grpo.models.spec import ModelSpec

CHUNKED = {"hunyuan15_t2v": hunyuan15_pixels, "wan_t2v": wan_pixels}


def latents(vae: Any, batch: int, frames: int) -> torch.Tensor:
    channels = vae.config.get("latent_channels") or vae.config["z_dim"]
    return torch.randn(batch, channels, frames, 2, 3, generator=torch.Generator().manual_seed(frames))


@torch.no_grad()
def stock(vae: Any, z: torch.Tensor) -> torch.Tensor:
    return torch.cat([vae.decode(clip).sample for clip in z.split(1)])


@torch.no_grad()
def chunked(pixels: Callable, vae: Any, z: torch.Tensor, **options: int) -> torch.Tensor:
    return torch.cat(list(pixels(vae, z, **options)), dim=2)


def assert_same(given: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to round-off: a small part of how far pixels spread."""
    assert expected.std() > 1e-3
    torch.testing.assert_close(given, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.fixture(scope="module")
def wide_vae() -> Any:
    """HunyuanVideo-1.5's VAE with a width per level, as its checkpoint and the miniature have: upsampling changes the width too."""
    from research.pretraining.shapes.networks import build_vae
    from research.pretraining.shapes.options import Sizes

    torch.manual_seed(0)
    return build_vae(Sizes(latent_channels=4, vae_channels=(4, 4, 8, 8))).eval()


@pytest.mark.parametrize("frames", [1, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_chunks_of_frames_are_the_whole_decode(frames: int, model, wide_vae) -> None:
    for vae in (model("hunyuan15_t2v").pipe.vae, wide_vae):
        z = latents(vae, 2, frames)
        whole = stock(vae, z)
        assert whole.shape[2] == 4 * frames - 3
        for size in (1, 2, 8)[: frames + 1]:
            assert_same(chunked(hunyuan15_pixels, vae, z, frames=size), whole)


@pytest.fixture(scope="module")
def residual_vae() -> Any:
    """The VAE of Wan 2.2 5B in small: other blocks, and pixels in patches."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    patches = {"patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    small = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    vae = AutoencoderKLWan(is_residual=True, **small, **patches).eval().requires_grad_(False)
    vae.decoder.conv_out.bias.copy_(torch.linspace(-2, 2, 12))  # some are blacker than black, some whiter than white
    return vae


@pytest.mark.parametrize("frames", [1, 3])
def test_wans_frames_are_the_whole_decode(frames: int, model, residual_vae) -> None:
    for vae in (model("wan_t2v").pipe.vae, residual_vae):
        z = latents(vae, 2, frames)
        assert_same(chunked(wan_pixels, vae, z), stock(vae, z))


def test_large_clips_are_decoded_in_chunks_and_small_ones_whole(fresh_model, monkeypatch: pytest.MonkeyPatch) -> None:
    one, told = (
        fresh_model("hunyuan15_t2v", frames=9, width=48, train=False, options=options)
        for options in ({}, {"decode_chunk": 1})
    )
    z = torch.randn(1, *one.latent_shape())
    (whole,) = one.codec.chunks(z)
    # for cards on which the usual chunk is too much
    assert [part.shape[2] for part in told.codec.chunks(z)] == [1, 4, 4]
    monkeypatch.setattr(decoding, "CHUNK_PIXELS", 8 * 32 * 48)  # two latent frames
    parts = list(one.codec.chunks(z))
    assert [part.shape[2] for part in parts] == [5, 4]
    assert [part.shape[2] for part in one.codec.chunks(z.expand(2, *z.shape[1:]))] == [1, 4, 4]
    assert_same(torch.cat(parts, dim=2), whole)
    monkeypatch.setattr(decoding, "CHUNK_PIXELS", 1)
    assert len(list(one.codec.chunks(z))) == 3
    decoded, expected = one.decode(z), to_uint8(one.codec.chunks(one.codec.to_vae(z)))
    assert (decoded.int() - expected.int()).abs().max() <= 1  # other places in memory may round another way


@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)])
def test_the_norm_is_the_stock_norm(bias: bool, dtype: torch.dtype) -> None:
    """To round-off in float32; in bfloat16 all but a few bits are the same, as it rounds in the same places."""
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15RMS_norm
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, 3, 8, 8, generator=generator) * 3
    x[0, :, 0, 0, 0] = 0  # neither divides by zero
    for kind in (HunyuanVideo15RMS_norm, WanRMS_norm):
        norm = kind(24, images=False, bias=bias).requires_grad_(False)
        norm.gamma.normal_(generator=generator)
        if bias:
            norm.bias.normal_(generator=generator)
        norm, given = norm.to(dtype), x.to(dtype)
        theirs, ours = norm(given), rms_norm(norm, given)
        assert torch.isfinite(ours).all()
        if dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        else:
            assert ours.dtype == dtype
            assert (ours != theirs).float().mean() < 0.01


def test_the_vae_computes_in_bfloat16_where_that_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, fields, dtype in (
        ("cpu", {"dtype": "bfloat16"}, torch.float32),
        ("cpu", {"dtype": "bfloat16", "vae_dtype": "bfloat16"}, torch.bfloat16),
        (None, {"dtype": "bfloat16"}, torch.bfloat16),
        (None, {"dtype": "float32"}, torch.float32),
        (None, {"dtype": "bfloat16", "vae_dtype": "float32"}, torch.float32),
    ):
        assert load_dtypes(ModelSpec(**fields), device)["vae"] == dtype


def test_a_library_that_was_turned_off_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    found = {}
    for machine in ("x86_64", "aarch64"):  # on the second it is the slower way
        for enabled in (True, False):
            monkeypatch.setattr(decoding.platform, "machine", lambda machine=machine: machine)
            monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
            found[machine, enabled] = decoding._onednn()
    assert [case for case, used in found.items() if used] == [("x86_64", True)]


@pytest.mark.parametrize("name", ["wan_t2v", pytest.param("hunyuan15_t2v", marks=pytest.mark.slow)])
def test_chunks_that_run_again_have_the_gradient_of_the_whole_decode_and_keep_little(
    name: str, model, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = model(name).pipe.vae
    z = latents(vae, 1, 4).requires_grad_()
    weights = torch.randn(3, 1, 1, 1, generator=torch.Generator().manual_seed(1))

    def back(decode: Callable) -> tuple[torch.Tensor, int]:
        kept: dict[int, torch.Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(id(x), x), lambda x: x):
            pixels = decode()
        size = sum(x.untyped_storage().nbytes() for x in kept.values())
        return torch.autograd.grad((pixels * weights).sum(), z)[0], size

    def ours() -> torch.Tensor:
        return torch.cat(list(CHUNKED[name](vae, z, **({"frames": 1} if name.startswith("hunyuan") else {}))), dim=2)

    given, little = back(ours)
    stocks, _ = back(lambda: vae.decode(z, return_dict=False)[0])
    monkeypatch.setattr(decoding, "_kept_small", lambda step, *inputs: step(*inputs))
    plain, everything = back(ours)
    torch.testing.assert_close(given, plain, rtol=0, atol=1e-6 * float(plain.abs().max()))
    torch.testing.assert_close(
        given, stocks, rtol=0, atol=1e-4 * float(plain.abs().max())
    )  # whose norms round otherwise
    assert little < 0.1 * everything


@pytest.mark.parametrize(
    "kind", ["wan_t2v", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("hunyuan15_t2v", "ltx", "flux"))]
)
def test_pixels_are_what_decode_rounds_and_have_its_slope(kind: str, model) -> None:
    ours, draw = model(kind), torch.Generator().manual_seed(0)
    z = torch.randn(1, *ours.latent_shape(), generator=draw)
    latents = z.clone().requires_grad_()
    clip, decoded = ours.codec.pixels(latents), ours.decode(z)
    assert clip.shape == decoded.shape
    assert (clip.detach() - decoded.float()).abs().max() <= 0.51
    weight = torch.randn(clip.shape, generator=draw)
    (gradient,) = torch.autograd.grad((weight * clip).sum(), latents)
    direction = gradient / gradient.norm()
    with torch.no_grad():
        ends = [float((weight * ours.codec.pixels(z + step * direction)).double().sum()) for step in (-0.0005, 0.0005)]
    assert float(gradient.norm()) > 0
    assert (ends[1] - ends[0]) / 0.001 == pytest.approx(float(gradient.norm()), rel=0.05)
    for frames in ([0, 3], [2], [0]) if kind == "wan_t2v" else ():
        some = ours.codec.pixels(latents, frames).detach()  # the others are black
        for index in range(decoded.shape[1]):
            assert torch.equal(some[:, index].round(), decoded[:, index].float() * (index in frames))


@pytest.mark.parametrize("kind", ["wan_t2v", pytest.param("hunyuan15_t2v", marks=pytest.mark.slow)])
def test_there_is_one_past_at_a_time(kind: str, model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What convolutions have seen last is about as large as what a chunk needs: each goes as soon as there is a newer one."""
    pasts: list[list[Any]] = []
    in_turn = decoding._in_turn
    monkeypatch.setattr(
        decoding, "_in_turn", lambda up, chunks, past: (pasts.append(past), in_turn(up, chunks, past))[1]
    )
    vae = model(kind).pipe.vae
    options = {"frames": 1} if kind.startswith("hunyuan") else {}
    with torch.no_grad():
        pixels = CHUNKED[kind](vae, latents(vae, 1, 4), **options)
        next(pixels), next(pixels)
        seen = [weakref.ref(one) for one in pasts[0] if isinstance(one, torch.Tensor)]
        assert len(seen) > 10
        alive: list[int] = []
        hook = vae.decoder.norm_out.register_forward_hook(
            lambda *_: alive.append(sum(one() is not None for one in seen))
        )
        next(pixels)
        hook.remove()
        pixels.close()
    assert alive == [1]  # that of the last convolution, which comes after the norm
