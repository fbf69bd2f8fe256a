"""A small decoder makes training's clips, and nothing else; what does not fit the model is refused before a rollout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.decoders import load_decoder
from sage_grpo.types import VideoSpec


def stretched(latents: Tensor) -> Tensor:
    """The first three channels at the size of a tiny Wan's clips: eight times as wide, four times as long but for the first frame."""
    frames = 4 * latents.shape[2] - 3
    size = (frames, 8 * latents.shape[3], 8 * latents.shape[4])
    return torch.nn.functional.interpolate(latents[:, :3], size).clamp(-1, 1)


def too_short(latents: Tensor) -> Tensor:
    return stretched(latents)[:, :, :1]


def no_pixels(latents: Tensor) -> str:
    return "pixels"


def test_a_function_of_ones_own_decodes_to_clips(model) -> None:
    ours = model("wan_t2v", train=False)
    latents = torch.randn(2, *ours.latent_shape())
    clips = load_decoder("test_decoders:stretched", ours)(latents.double())
    assert clips.shape == ours.decode(latents).shape
    assert clips.dtype == torch.uint8
    expected = ((stretched(latents) + 1) / 2 * 255).round().permute(0, 2, 3, 4, 1)
    assert (clips - expected).abs().max() <= 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_decoders:too_short", r"test_decoders:too_short.*\(1, 3, 9, 32, 32\), but it made \(1, 3, 1, 32, 32\)"),
        ("test_decoders:no_pixels", "but it made a str"),
        ("test_decoders:stretchd", "has no 'stretchd'. Did you mean 'stretched'"),
        ("nowhere", r"nowhere: it has no config\.json of a diffusers model"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(name: str, said: str, model) -> None:
    with pytest.raises(ModelError, match=said):
        load_decoder(name, model("wan_t2v", train=False, frames=9, height=32, width=32))


def test_an_autoencoder_tiny_decodes_pictures_and_is_refused_for_clips(tmp_path) -> None:
    from diffusers import AutoencoderTiny

    small = {"encoder_block_out_channels": (4, 4), "decoder_block_out_channels": (4, 4)}
    blocks = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    AutoencoderTiny(latent_channels=4, **small, **blocks).save_pretrained(tmp_path)
    pictures = SimpleNamespace(
        device=torch.device("cpu"),
        video=VideoSpec(frames=1, height=16, width=16, fps=1.0),
        latent_shape=lambda: (4, 1, 8, 8),
    )
    latents = torch.randn(2, 4, 1, 8, 8)
    clips = load_decoder(str(tmp_path), pictures)(latents)
    with torch.no_grad():
        stock = AutoencoderTiny.from_pretrained(tmp_path).decode(latents[:, :, 0]).sample
    expected = ((stock.clamp(-1, 1) + 1) / 2 * 255).round().permute(0, 2, 3, 1)[:, None]
    assert (clips - expected).abs().max() <= 1
    assert clips.float().std() > 1
    for shape in ((4, 2, 8, 8), (16, 1, 8, 8)):
        other = SimpleNamespace(**{**vars(pictures), "latent_shape": lambda shape=shape: shape})
        with pytest.raises(ModelError, match=rf"of 4 channels decodes single .*{shape[0]} channels and {shape[1]}"):
            load_decoder(str(tmp_path), other)
