"""Latents as the rows of tokens that some networks take, and back."""

from __future__ import annotations

from torch import Tensor

from sage_grpo.models.network.sizes import Grid

SIDE = 2
"""Latents of a token along height and width where a pipeline of images packs them, whatever its network's own patch size."""


def packed_grid(channels: int, spatial: int) -> Grid:
    """How pictures are divided by such a pipeline, whose network takes tokens of so many channels."""
    return Grid(channels=channels // SIDE**2, temporal=None, spatial=spatial, patch=(1, SIDE, SIDE))


def pack(x: Tensor, side: int = 1) -> Tensor:
    """B x C x F x H x W as B x tokens x (C side side): a token is a square of one frame."""
    squares = x.unflatten(4, (-1, side)).unflatten(3, (-1, side))  # B C F h side w side
    return squares.permute(0, 2, 3, 5, 1, 4, 6).flatten(4, 6).flatten(1, 3)


def unpack(tokens: Tensor, x: Tensor, side: int = 1) -> Tensor:
    """The inverse; x has the shape of the result."""
    frames, height, width = x.shape[2], x.shape[3] // side, x.shape[4] // side
    squares = tokens.unflatten(2, (-1, side, side)).unflatten(1, (frames, height, width))  # B F h w C side side
    return squares.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)
