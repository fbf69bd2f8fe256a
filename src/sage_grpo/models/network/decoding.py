"""Latents to uint8 clips with diffusers' own decoders, in chunks of frames, with the result of the whole decode up to round-off.

Both decoders are causal in time and normalize every position by itself, so a chunk needs of the past only the last input frames of
each convolution. Wan's decoder keeps them itself; for HunyuanVideo-1.5 they are kept here. While the modules decode, some of them run
a function of this file instead of their own forward. Where a gradient is wanted, chunks are decoded again in the backward pass.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sage_grpo.models import no_numbers

CHUNK_PIXELS = 4 * 2**20
"""Pixels that a decoder makes at once, over all frames and clips: 8 frames of 480 x 848. A clip that is smaller is decoded whole."""
GRAPH_PIXELS = 2 * 2**20  # the same where a gradient is wanted: 4 frames of 480 x 848, one latent frame


def to_uint8(chunks: Iterable[Tensor], decoders: Iterable[nn.Module] = ()) -> Tensor:
    """Pixels in [-1, 1], B x 3 x frames x H x W in chunks of frames, as one clip B x F x H x W x 3 of uint8 on the CPU."""
    clips, device, broken = [], torch.device("cpu"), torch.tensor(False)
    for pixels in chunks:
        broken = broken.to(pixels.device) | pixels.isnan().any()  # read at the end: nothing is waited for here
        clip = ((pixels.to(torch.float32) * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        clips.append(clip.permute(0, 2, 3, 4, 1).to("cpu", non_blocking=True))  # while the next chunk is computed
        device = pixels.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if bool(broken):
        raise no_numbers("The decoded clip", decoders)
    return torch.cat(clips, dim=1).contiguous()


def to_floats(chunks: Iterable[Tensor], count: int, frames: Sequence[int] | None = None) -> Tensor:
    """Pixels before rounding, with their graph: float32 clips in [0, 255] of `count` frames; those not among `frames` are black."""
    clips, passed = [], 0
    for pixels in chunks:
        clips.append(((pixels.to(torch.float32) * 0.5 + 0.5).clamp(0, 1) * 255).permute(0, 2, 3, 4, 1))
        passed += pixels.shape[2]
        if frames is not None and passed > frames[-1]:
            break
    made = torch.cat(clips, dim=1)
    if frames is None or len(frames) == count:
        return made
    black = made.new_zeros((len(made), count, *made.shape[2:]))
    return black.index_copy(1, torch.tensor(frames, device=made.device), made[:, list(frames)])


def hunyuan15_pixels(vae: Any, z: Tensor, frames: int | None = None) -> Iterator[Tensor]:
    """`vae.decode(z)` in chunks of `frames` latent frames; None is as many as CHUNK_PIXELS allows."""
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
        HunyuanVideo15CausalConv3d,
        HunyuanVideo15RMS_norm,
    )

    decoder = vae.decoder
    pixels = len(z) * vae.temporal_compression_ratio * z.shape[3] * z.shape[4] * vae.spatial_compression_ratio**2
    frames = frames or max(1, (GRAPH_PIXELS if z.requires_grad else CHUNK_PIXELS) // max(1, pixels))
    fast = _all(decoder, HunyuanVideo15RMS_norm, rms_norm)
    convolutions = _all(decoder, HunyuanVideo15CausalConv3d, _convolve)

    def middle(z: Tensor) -> Tensor:
        with _running(fast | convolutions):
            x = decoder.conv_in(z) + z.repeat_interleave(decoder.repeat, dim=1)
            x = decoder.mid_block.resnets[0](x)
            for attention, resnet in zip(decoder.mid_block.attentions, decoder.mid_block.resnets[1:]):
                x = resnet(x if attention is None else _attend(attention, x))
        return x

    def up(number: int, chunk: Tensor, past: list[Tensor | None]) -> Tensor:
        carries = {module: _Carry(module, before) for module, before in zip(convolutions, past)}
        past.clear()  # each is freed when its convolution has a newer one
        with _running(fast | (carries or convolutions)):
            made = _up(decoder, chunk, first=number == 0)
        past += [carry.past for carry in carries.values()]
        return made

    chunks = _kept_small(middle, z).split(frames, dim=2)
    past: list[Tensor | None] = [None] * (len(convolutions) if len(chunks) > 1 else 0)
    yield from _in_turn(up, chunks, past)


def wan_latents(vae: Any, latents: Tensor) -> Tensor:
    """Latents as the decoders of Wan and Qwen-Image expect them; written as their pipelines do, so that float32 gives their bits."""

    def channels(values: list[float]) -> Tensor:
        return torch.tensor(values).view(1, vae.config.z_dim, 1, 1, 1).to(latents.device, latents.dtype)

    return latents / (1.0 / channels(vae.config.latents_std)) + channels(vae.config.latents_mean)


def wan_pixels(vae: Any, z: Tensor) -> Iterator[Tensor]:
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanRMS_norm, WanUpsample, unpatchify

    # Stock upsampling copies pixels in float32, whatever they are in: the same numbers for twice the memory.
    fast = _all(vae.decoder, WanRMS_norm, rms_norm) | _all(vae.decoder, WanUpsample, nn.Upsample.forward)
    if z.device.type == "cpu":
        fast |= _all(vae.decoder, WanCausalConv3d, _conv_of_images)

    def up(number: int, frame: Tensor, past: list[Any]) -> Tensor:
        with _running(fast):
            made = vae.decoder(frame, feat_cache=past, feat_idx=[0], first_chunk=number == 0)
        return unpatchify(made, vae.config.patch_size or 1).clamp(-1, 1)

    vae.clear_cache()
    yield from _in_turn(up, vae.post_quant_conv(z).split(1, dim=2), list(vae._feat_map))


def _in_turn(
    up: Callable[[int, Tensor, list[Any]], Tensor], chunks: Sequence[Tensor], past: list[Any]
) -> Iterator[Tensor]:
    """The results of `up(number, chunk, past)` for one chunk after the other; `past`, the last inputs of the convolutions, is overwritten. With a
    graph, runs of sqrt(n) chunks keep only the past before them and run again in the backward pass; there every chunk does the same."""
    if not chunks[0].requires_grad:
        for number, chunk in enumerate(chunks):
            yield up(number, chunk, past)
        return

    def one(number: int, chunk: Tensor, *given: Any) -> tuple[Any, ...]:
        after = list(given)
        return up(number, chunk, after), *after

    def run(first: int, count: int, *given: Any) -> tuple[Any, ...]:
        made, past = [], given[count:]
        for number, chunk in enumerate(given[:count], first):
            frames, *past = _kept_small(one, number, chunk, *past)
            made.append(frames)
        return torch.cat(made, dim=2), *past

    together = math.isqrt(len(chunks))
    for first in range(0, len(chunks), together):
        group = chunks[first : first + together]
        made, *past = _kept_small(run, first, len(group), *group, *past)
        yield made


def _kept_small(step: Callable[..., Any], *inputs: Any) -> Any:
    """`step(*inputs)`, of which a graph keeps only the inputs: it runs again in the backward pass."""
    if not (torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in inputs)):
        return step(*inputs)
    return checkpoint(step, *inputs, use_reentrant=False, preserve_rng_state=False)


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    """The forward of both families' RMS norm, x / |x| * scale * gamma + bias, rounded where it rounds, without copies in float32;
    on a CPU the stock norm over a strided axis is 40 times slower than these sums of squares."""
    dim = 1 if norm.channel_first else -1
    if x.device.type == "cpu":
        length = x.float().square().sum(dim, keepdim=True).sqrt()
    else:
        length = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float32)
    if torch.is_grad_enabled() and x.requires_grad:  # nothing is written over that a backward pass needs
        y = (x / length.clamp_min(1e-12)).to(x.dtype) * norm.scale * norm.gamma
        return y + norm.bias if isinstance(norm.bias, Tensor) else y
    # Straight into a tensor of x's dtype: a GPU divides in float32 and writes no copy in float32.
    y = torch.div(x, length.clamp_min(1e-12), out=torch.empty_like(x)).mul_(norm.scale).mul_(norm.gamma)
    return y.add_(norm.bias) if isinstance(norm.bias, Tensor) else y


def _all(root: nn.Module, kind: type[nn.Module], forward: Callable[..., Tensor]) -> dict[nn.Module, Any]:
    return {module: partial(forward, module) for module in root.modules() if isinstance(module, kind)}


@contextmanager
def _running(forwards: dict[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del vars(module)["forward"]


def _up(decoder: Any, x: Tensor, *, first: bool) -> Tensor:
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = resnet(x)
        for upsample in block.upsamplers or ():
            x = upsample(x) if first or not upsample.add_temporal_upsample else _upsample(upsample, x)
    return decoder.conv_out(decoder.conv_act(decoder.norm_out(x)))


def _upsample(module: Any, x: Tensor) -> Tensor:
    """Upsampling in time of frames that follow others: only the first frame of a clip stays one frame."""
    unfold = partial(module._dcae_upsample_rearrange, r1=2)
    return unfold(module.conv(x)) + unfold(x).repeat_interleave(module.repeats, dim=1)


def _attend(block: Any, x: Tensor) -> Tensor:
    """The attention block, frame after frame without a mask: a frame sees itself and those before."""
    frames, height, width = x.shape[2:]
    normed = block.norm(x)
    query, key, value = (
        project(normed).flatten(3).permute(0, 2, 3, 1).contiguous() for project in (block.to_q, block.to_k, block.to_v)
    )
    rows = []
    for frame in range(frames):
        past = (tensor[:, None, : frame + 1].flatten(2, 3) for tensor in (key, value))
        rows.append(F.scaled_dot_product_attention(query[:, None, frame], *past)[:, 0])
    seen = torch.stack(rows, dim=1).permute(0, 3, 1, 2).unflatten(3, (height, width))
    return x + block.proj_out(seen)


class _Carry:
    """A causal convolution whose calls follow one another: it goes on where the last one ended."""

    def __init__(self, module: Any, past: Tensor | None) -> None:
        self.module, self.past = module, past

    def __call__(self, x: Tensor) -> Tensor:
        past = _first(self.module, x) if self.past is None else self.past
        count = past.shape[2]
        # A copy, not a view, which would keep all of x; one frame alone may be less than the past that is needed.
        self.past = torch.cat([past, x[:, :, -count:]], dim=2)[:, :, -count:].clone()
        return _convolve(self.module, x, past)


def _first(module: Any, x: Tensor) -> Tensor:
    return x[:, :, :1].expand(-1, -1, module.time_causal_padding[4], -1, -1)


def _conv_of_images(module: Any, x: Tensor, past: Tensor | None = None) -> Tensor:
    """Wan's causal convolution as one over images with three frames in their channels: three times as fast on a CPU."""
    batch, taps = len(x), module.weight.shape[2]
    if taps > 1 and past is not None:
        x = torch.cat([past, x], dim=2)
    before = module._padding[4] - (0 if past is None or taps == 1 else past.shape[2])
    x = F.pad(x, (0, 0, 0, 0, before, 0)).transpose(1, 2)
    frames = x.shape[1] - taps + 1
    images = torch.cat([x[:, tap : tap + frames] for tap in range(taps)], dim=2).flatten(0, 1)
    weight = module.weight.transpose(1, 2).flatten(1, 2)
    y = F.conv2d(images, weight, module.bias, padding=module._padding[0])
    return y.unflatten(0, (batch, frames)).transpose(1, 2)


def _convolve(module: Any, x: Tensor, past: Tensor | None = None) -> Tensor:
    """The convolution of x after its past (by default its first frame), with the borders of every frame repeated: put together in one copy."""
    past = _first(module, x) if past is None else past
    conv, (left, right, top, bottom, _, _) = module.conv, module.time_causal_padding
    (batch, channels, frames, height, width), before = x.shape, past.shape[2]
    size = (batch, channels, before + frames, top + height + bottom, left + width + right)
    plain = conv.weight.is_contiguous() or not conv.weight.is_contiguous(memory_format=torch.channels_last_3d)
    layout = torch.contiguous_format if plain else torch.channels_last_3d  # that of the weights
    whole = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout)
    inner = whole[..., top : top + height, left : left + width]
    inner[:, :, :before], inner[:, :, before:] = past, x
    rows = whole[..., left : left + width]
    rows[..., :top, :], rows[..., top + height :, :] = inner[..., :1, :], inner[..., -1:, :]
    whole[..., :left], whole[..., left + width :] = rows[..., :1], rows[..., -1:]
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_grad_enabled() or not _onednn():
        return conv(whole)
    # For one small clip PyTorch takes its slow path on a CPU.
    return torch.mkldnn_convolution(whole, conv.weight, conv.bias, [0, 0, 0], [1, 1, 1], [1, 1, 1], 1)


def _onednn() -> bool:
    """True if oneDNN is available, is faster on this CPU, and has not been turned off by the user."""
    onednn: Any = torch.backends.mkldnn  # `enabled` has the wrong type in torch's stubs
    return platform.machine() in ("x86_64", "AMD64") and onednn.is_available() and bool(onednn.enabled)
