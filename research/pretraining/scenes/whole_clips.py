"""Wan's VAE on whole clips, with gradients: the stock modules' own weights and numbers, without their cache of frames.

The stock VAE encodes four frames at a time and decodes one latent frame at a time, and its convolutions in three dimensions are slow for few channels
(on a CPU without oneDNN's by a factor of ten). Here all frames go through a layer at once, and a convolution over time is one over images
that have three frames in their channels. Only VAEs as Wan 2.1's: without residual blocks around the resampling, patches or attention between.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


class WholeClips:
    """A Wan VAE as a codec for training: clips and latents are B x C x F x H x W."""

    def __init__(self, vae: AutoencoderKLWan, bfloat16: bool = False) -> None:
        """`bfloat16` computes in it, on weights as they are, where the VAE is on a GPU."""
        config = vae.config
        if config.is_residual or config.patch_size is not None or config.attn_scales:
            raise ValueError("Only Wan 2.1's VAE runs on whole clips: without is_residual, patch_size and attn_scales.")
        self.vae, self._half = vae, bfloat16

    @property
    def device(self) -> torch.device:
        """Device of its weights."""
        device: torch.device = self.vae.device
        return device

    def encoder(self, x: Tensor) -> Tensor:
        """Means and log-variances, as `vae.encode` finds them."""
        frames, network = x.shape[2], self.vae.encoder
        with self._precision():
            y = _convolve(network.conv_in, _images(x), frames)
            for layer in network.down_blocks:
                y, frames = (
                    _resample(layer, y, frames) if hasattr(layer, "resample") else (_block(layer, y, frames), frames)
                )
            y = _head(network, _middle(network.mid_block, y, frames), frames)
            return _clips(_convolve(self.vae.quant_conv, y, frames), frames).float()

    def decoder(self, z: Tensor) -> Tensor:
        """Pixels, as `vae.decode` makes them, but not clamped."""
        frames, network = z.shape[2], self.vae.decoder
        with self._precision():
            y = _convolve(network.conv_in, _convolve(self.vae.post_quant_conv, _images(z), frames), frames)
            y = _middle(network.mid_block, y, frames)
            for block in network.up_blocks:
                for layer in block.resnets:
                    y = _block(layer, y, frames)
                for layer in block.upsamplers or ():
                    y, frames = _resample(layer, y, frames)
            return _clips(_head(network, y, frames), frames).float()

    def _precision(self) -> Any:
        # Without its cache, which a captured graph must not have.
        cuda = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self._half and cuda else nullcontext()


def _images(x: Tensor) -> Tensor:
    """B x C x F x H x W to (B F) x C x H x W: every frame is an image, in the order of clips and then frames."""
    return _laid_out(x.transpose(1, 2).flatten(0, 1))


def _laid_out(y: Tensor) -> Tensor:
    """In memory as convolutions like it: on a GPU the channels of a pixel lie together."""
    return y.contiguous(memory_format=torch.channels_last if y.is_cuda else torch.contiguous_format)


def _clips(y: Tensor, frames: int) -> Tensor:
    return y.unflatten(0, (-1, frames)).transpose(1, 2)


def _convolve(module: Any, y: Tensor, frames: int) -> Tensor:
    """A causal convolution over time and space; before a clip there are zeros."""
    weight = module.weight
    taps, side = weight.shape[2], weight.shape[3]
    if taps > 1:
        y = _with_past(y, frames, taps)
    return F.conv2d(y, _folded(weight), module.bias, padding=side // 2)


def _with_past(y: Tensor, frames: int, taps: int) -> Tensor:
    """Every frame with those before it in its channels, the oldest first."""
    clips = F.pad(y.unflatten(0, (-1, frames)), (0, 0, 0, 0, 0, 0, taps - 1, 0))
    return _beside([clips[:, tap : tap + frames] for tap in range(taps)])


def _beside(parts: list[Tensor]) -> Tensor:
    """Frames side by side in the channels, as images."""
    return _laid_out(torch.cat(parts, dim=2).flatten(0, 1))


def _folded(weight: Tensor) -> Tensor:
    """Weights out x in x time x H x W for inputs that have time in their channels."""
    return _laid_out(weight.transpose(1, 2).flatten(1, 2))


def _norm(module: Any, y: Tensor) -> Tensor:
    """The RMS norm of every position."""
    if y.device.type == "cpu" and y.is_contiguous():  # where a norm over a strided axis is many times slower
        length = y.square().sum(1, keepdim=True).clamp_min(1e-24).sqrt()
        return (y / length * (module.scale * module.gamma.reshape(1, -1, 1, 1))).to(y.dtype)
    # The channels of a pixel lie together: one kernel reads and writes each once, in the precision that is there.
    rows, gain = y.permute(0, 2, 3, 1), module.gamma.flatten().to(y.dtype)
    with torch.autocast(y.device.type, enabled=False):
        return F.rms_norm(rows, gain.shape, gain, eps=1e-12).permute(0, 3, 1, 2)


def _block(block: Any, y: Tensor, frames: int) -> Tensor:
    """A residual block."""
    straight = _convolve(block.conv_shortcut, y, frames) if hasattr(block.conv_shortcut, "weight") else y
    y = _convolve(block.conv1, F.silu(_norm(block.norm1, y)), frames)
    return straight + _convolve(block.conv2, F.silu(_norm(block.norm2, y)), frames)


def _middle(block: Any, y: Tensor, frames: int) -> Tensor:
    """Residual blocks with attention within every frame between them."""
    y = _block(block.resnets[0], y, frames)
    for attention, resnet in zip(block.attentions, block.resnets[1:]):
        y = _block(resnet, _attend(attention, y), frames)
    return y


def _attend(block: Any, y: Tensor) -> Tensor:
    height, width = y.shape[2:]
    query, key, value = block.to_qkv(_norm(block.norm, y)).flatten(2).transpose(1, 2)[:, None].chunk(3, dim=-1)
    seen = F.scaled_dot_product_attention(query, key, value)[:, 0].transpose(1, 2).unflatten(2, (height, width))
    return y + block.proj(seen)


def _head(network: Any, y: Tensor, frames: int) -> Tensor:
    return _convolve(network.conv_out, F.silu(_norm(network.norm_out, y)), frames)


def _resample(module: Any, y: Tensor, frames: int) -> tuple[Tensor, int]:
    """Half or twice the size in space and, where the module has weights for it, in time: the first frame of a clip always stays one frame."""
    if module.mode == "upsample3d":
        first, later = y.unflatten(0, (-1, frames)).split([1, frames - 1], dim=1)
        if frames > 1:
            # Frames after the first know nothing of it here.
            both = _convolve(module.time_conv, later.flatten(0, 1), frames - 1).unflatten(1, (2, -1))
            later = both.unflatten(0, (-1, frames - 1)).flatten(1, 2)
        y, frames = torch.cat([first, later], dim=1).flatten(0, 1), 2 * frames - 1
    y = module.resample(_laid_out(y))
    if module.mode == "downsample3d":
        clips = y.unflatten(0, (-1, frames))
        if frames > 1:
            triples = _beside([clips[:, :-2:2], clips[:, 1:-1:2], clips[:, 2::2]])
            made = F.conv2d(triples, _folded(module.time_conv.weight), module.time_conv.bias)
            frames = 1 + (frames - 1) // 2
            y = torch.cat([clips[:, :1], made.unflatten(0, (-1, frames - 1))], dim=1).flatten(0, 1)
    return y, frames
