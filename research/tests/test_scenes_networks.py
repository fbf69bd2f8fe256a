"""The scenes world's networks: fast ways equal stock ones, and a saved folder is one that diffusers and our family run alike."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from research.pretraining.scenes import networks
from research.pretraining.scenes.networks import FastTransformer, prompt_ids
from research.pretraining.scenes.options import Sizes
from research.pretraining.scenes.pretrain import MAKER
from research.pretraining.scenes.stages import CAPTION, samples, to_flow
from research.pretraining.scenes.whole_clips import WholeClips
from research.scenes.scene import words
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.schedule import Schedule

TINY = Sizes(latent_channels=4, vae_channels=(4, 8, 12), heads=2, head_dim=12, blocks=2, text_width=16)
TEXTS = ["two striped red balls bounce in a meadow while the camera pans left", "", "a zebra"]


@pytest.fixture(scope="module")
def tokenizer():
    return networks.build_tokenizer(words())


@pytest.fixture(scope="module")
def vae():
    """With weights at which no mistake is hidden: a fresh one has many zeros and ones."""
    torch.manual_seed(0)
    vae = networks.build_vae(TINY).eval()
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if "gamma" in name or not parameter.any():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return vae


@pytest.fixture(scope="module")
def folder(vae, tokenizer, tmp_path_factory) -> Path:
    """A random pipeline, saved: not silent, as a fresh one is."""
    torch.manual_seed(1)
    transformer, text_encoder = networks.build_transformer(TINY), networks.build_text_encoder(TINY, len(tokenizer))
    with torch.no_grad():
        for parameter in transformer.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    FastTransformer(transformer)  # as training leaves it
    vae.register_to_config(latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[0.5, 1.5, 1.0, 2.0])
    folder = tmp_path_factory.mktemp("scenes") / "pipeline"
    MAKER.save(vae, transformer, text_encoder, tokenizer, folder, 3.0)
    return folder


@pytest.fixture(scope="module")
def stock(folder):
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("frames", [1, 5, 17])
def test_whole_clips_are_what_the_stock_vae_makes_of_them(frames: int, vae) -> None:
    codec, latent_frames = WholeClips(vae), 1 + (frames - 1) // 4
    x, z = torch.rand(2, 3, frames, 16, 24) * 2 - 1, torch.randn(2, 4, latent_frames, 4, 6)
    with torch.no_grad():
        found = codec.encoder(x)
        assert found.shape == (2, 8, latent_frames, 4, 6)
        torch.testing.assert_close(found, vae.encode(x).latent_dist.parameters, atol=2e-5, rtol=0)
        torch.testing.assert_close(codec.decoder(z).clamp(-1, 1), vae.decode(z).sample, atol=2e-5, rtol=0)


def test_whole_clips_have_gradients_everywhere(vae) -> None:
    """Also where all channels of a position are zero: there the derivative of a norm is not finite."""
    vae = deepcopy(vae)
    torch.nn.init.zeros_(vae.encoder.conv_in.bias)
    codec, noise = WholeClips(vae), torch.zeros(1, 4, 2, 2, 2, requires_grad=True)
    mean = codec.encoder(torch.zeros(1, 3, 5, 8, 8)).chunk(2, dim=1)[0]
    codec.decoder(mean + noise).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in vae.parameters())
    assert noise.grad.abs().min() > 0


def test_fast_text_and_velocity_are_the_stock_ones_on_512_tokens(stock) -> None:
    x, sigma = torch.randn(3, 4, 3, 4, 4), torch.tensor([0.2, 0.7, 1.0])
    ids = prompt_ids(stock.tokenizer, TEXTS, CAPTION)
    with torch.no_grad():
        padded = stock._get_t5_prompt_embeds(TEXTS, max_sequence_length=512)
        text = networks.encode_text(stock.text_encoder, ids)
        torch.testing.assert_close(text, padded[:, :CAPTION], atol=2e-6, rtol=0)
        expected = stock.transformer(x, sigma * 1000, padded).sample
        assert (expected[1:] - stock.transformer(x, sigma * 1000, padded.roll(1, 0)).sample[1:]).abs().max() > 1e-3
        processors = stock.transformer.attn_processors
        found = FastTransformer(stock.transformer)(x, sigma, text, ids)
        stock.transformer.set_attn_processor(processors)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)


def test_our_family_and_the_stock_pipeline_agree_on_the_folder(folder, stock, vae) -> None:
    model = ModelSpec(path=str(folder), train=False, cache=None, guidance_scale=1.0).load()
    assert model.latent_shape() == (4, 5, 16, 16)
    assert (model.shift, model.tokens, model.video.fps) == (3.0, 320, 8.0)
    assert {part.dtype for part in (stock.vae, stock.transformer, stock.text_encoder)} == {torch.float32}
    noise = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    call = {"height": 64, "width": 64, "num_frames": 17, "num_inference_steps": 2, "guidance_scale": 1.0}
    latents = stock(TEXTS[0], **call, latents=noise, output_type="latent", max_sequence_length=512).frames
    policy = Policy(model, Ode(), Schedule(model.sigmas(2)))
    torch.testing.assert_close(integrate(policy, noise, model.encode(TEXTS[:1])), latents, atol=1e-4, rtol=1e-4)
    # So do the clips that training shows.
    ids = prompt_ids(stock.tokenizer, TEXTS[:1], CAPTION)
    fast = FastTransformer(deepcopy(stock.transformer))
    shown = samples(stock.vae, fast, stock.text_encoder, ids, 3.0, steps=2)
    start = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    plain = Policy(model, Ode(), Schedule.shifted(2, 3.0))
    clip = model.decode(integrate(plain, start, model.encode(TEXTS[:1])))
    assert (shown.int() - clip.int()).abs().max() <= 1
    # What the flow calls a latent is what the pipelines decode: the scale is undone once.
    means = torch.randn(1, 4, 5, 16, 16)
    torch.testing.assert_close(model.codec.to_vae(to_flow(vae, means)), means, atol=1e-5, rtol=1e-5)
