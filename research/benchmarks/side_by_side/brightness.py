"""The reward of all: mean brightness of a clip, which costs nothing."""

import torch


def brightness(videos: torch.Tensor, prompts: list[str], fps: float) -> torch.Tensor:
    """uint8 B x F x H x W x 3."""
    return torch.stack([clip.float().mean() / 255 for clip in videos]).cpu()
