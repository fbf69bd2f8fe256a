"""Making the miniature: fast ways equal stock ones, data keep their promises, short runs learn, the ceiling is measured."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from research.pretraining.pretrain import pretrain
from research.pretraining.shapes import networks
from research.pretraining.shapes.__main__ import Options, run
from research.pretraining.shapes.distill import fit, trajectories
from research.pretraining.shapes.networks import build_text_encoder, build_tokenizer, build_transformer
from research.pretraining.shapes.options import DistillOptions, PretrainOptions, Sizes
from research.pretraining.shapes.pretrain import MAKER
from sage_grpo.models.spec import ModelSpec
from sage_grpo.worlds.shapes.scene import scenes_of, to_text, words

TINY = Sizes(latent_channels=4, vae_channels=(8, 8, 8, 8), heads=2, head_dim=16, blocks=2, text_width=24)
CPU = torch.device("cpu")


def test_fast_text_and_velocity_equal_the_pipeline() -> None:
    from diffusers import HunyuanVideo15Pipeline

    tokenizer = build_tokenizer(words())
    text_encoder = build_text_encoder(TINY, len(tokenizer), 0).eval()
    transformer = build_transformer(TINY).eval()
    with torch.no_grad():
        for parameter in transformer.parameters():  # gates and outputs start at zero, which would hide everything
            if not parameter.any():
                parameter.normal_(std=0.1)
        prompts = [to_text(scene, 1) for scene in scenes_of("train")[:2]]
        states, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(text_encoder, tokenizer, prompts, CPU)
        ids = torch.tensor(networks.prompt_ids(tokenizer, prompts))
        fast = networks.encode_text(text_encoder, torch.tensor(networks.prefix_ids(tokenizer)), ids)
        assert mask.sum(1).tolist() == [ids.shape[1]] * 2
        torch.testing.assert_close(fast, states[:, : ids.shape[1]], atol=1e-5, rtol=0)

        x, sigma = torch.randn(2, 4, 3, 2, 2), torch.tensor([0.3, 0.9])
        stock = transformer(
            torch.cat([x, torch.zeros_like(x), torch.zeros_like(x[:, :1])], dim=1),
            sigma * 1000,
            states,
            mask,
            encoder_hidden_states_2=torch.zeros(2, 4, 16),
            encoder_attention_mask_2=torch.zeros(2, 4),
            image_embeds=torch.zeros(2, 3, 8),
        ).sample
        assert stock.std() > 0.01
        torch.testing.assert_close(
            networks.velocity(networks.packed(transformer), x, sigma, fast), stock, atol=1e-5, rtol=0
        )


def test_a_run_saves_a_pipeline(tmp_path: Path) -> None:
    from diffusers import HunyuanVideo15Pipeline

    sizes = {"latent_channels": 4, "vae_channels": "8,8,8,8", "heads": 1, "blocks": 1}
    steps = {"vae_steps": 2, "vae_batch": 2, "vae_clips": 4, "flow_steps": 3, "flow_batch": 8, "flow_clips": 16}
    scores = {"score_prompts": 2, "score_steps": 2, "report_seconds": 0}
    options = PretrainOptions(out=tmp_path, device="cpu", **sizes, **steps, **scores)
    assert pretrain(options, MAKER) == 0
    folder = tmp_path / "pipeline"
    pipe = HunyuanVideo15Pipeline.from_pretrained(folder)
    video = pipe("a red ring", num_frames=9, height=32, width=32, num_inference_steps=2, output_type="pt").frames
    assert video.shape == (1, 9, 3, 32, 32)
    assert torch.isfinite(video).all()
    assert "| TA/shape |" in (folder / "README.md").read_text()


TEXTS = ["a red ball moves right", "a blue square falls"]


def test_a_teacher_of_as_many_steps_is_fitted_already(tmp_path, capsys):
    """The mean velocity of one step is the velocity: no update has anything to learn."""
    given = {"steps": 2, "teacher_steps": 2, "clips": 2, "updates": 1, "batch": 2, "lr": 1e-3, "report_seconds": 0.0}
    student, options = ModelSpec(guidance_scale=1.0, cache=None).load("cpu"), DistillOptions(out=tmp_path, **given)
    fit(student, TEXTS, trajectories(student, TEXTS, options), options)
    assert "loss 0.0000" in capsys.readouterr().out


def test_the_ceiling_is_measured_and_written(tmp_path: Path) -> None:
    assert run(Options(action="ceiling", prompts=4, draws=1, out=tmp_path / "new")) == 0
    found = json.loads((tmp_path / "new" / "ceiling.json").read_text())
    assert (found["prompts"], found["draws"], found["seed"]) == (4, 1, 1)
    clean, after = found["clean"], found["after_vae"]
    assert clean["Overall"] > 1.98  # the judge knows a clean clip
    assert 1.8 < after["Overall"] < clean["Overall"] - 0.02  # the VAE costs something, and not much
    assert clean["drift"] < 0.01 < after["drift"] < 0.05
    assert clean["flicker"] < after["flicker"]
