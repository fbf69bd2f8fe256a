"""Laws of pretraining: fast paths equal stock ones, data keep their promises, a short run learns, saves and resumes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sage_grpo.worlds.making.flow import draw_sigma
from sage_grpo.worlds.making.imperfect import blur, jitter
from sage_grpo.worlds.making.options import Flaws
from sage_grpo.worlds.making.pretrain import pretrain
from sage_grpo.worlds.making.shapes.imperfect import CLIPS, imperfect_captions, misnamed
from sage_grpo.worlds.making.shapes.networks import (
    PREFIX_LENGTH,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
    encode_text,
    packed,
    prefix_ids,
    prompt_ids,
    used_parameters,
    velocity,
)
from sage_grpo.worlds.making.shapes.options import PretrainOptions, Sizes
from sage_grpo.worlds.making.shapes.pretrain import MAKER
from sage_grpo.worlds.making.training import Trainer, learning_rate
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, TEMPLATES, from_text, random_scenes, to_text, train_scenes, words

TINY = Sizes(latent_channels=4, vae_channels=(8, 8, 8, 8), heads=2, head_dim=16, blocks=2, text_width=24)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(words())


def test_every_word_is_one_token_and_the_prefix_is_cropped_exactly(tokenizer) -> None:
    for template in range(len(TEMPLATES)):
        text = to_text(train_scenes()[100], template)
        assert len(prompt_ids(tokenizer, [text])[0]) == len(text.split()) + 1
    assert len(prompt_ids(tokenizer, [""])[0]) == 1
    chat = [{"role": "system", "content": "Any message."}, {"role": "user", "content": "A RED ring "}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    assert ids[:PREFIX_LENGTH] == prefix_ids(tokenizer)
    assert ids[PREFIX_LENGTH:] == prompt_ids(tokenizer, ["a red ring"])[0]


def test_unknown_words_are_spelled_not_dropped(tokenizer) -> None:
    ids = prompt_ids(tokenizer, ["a zebra"])[0]
    assert tokenizer.decode(ids[:-1]) == " a zebra"


def test_fast_text_and_velocity_equal_the_pipeline(tokenizer) -> None:
    from diffusers import HunyuanVideo15Pipeline

    torch.manual_seed(0)
    text_encoder = build_text_encoder(TINY, len(tokenizer), 0).eval()
    transformer = build_transformer(TINY).eval()
    with torch.no_grad():
        for parameter in transformer.parameters():  # gates and outputs start at zero, which would hide everything
            if not parameter.any():
                parameter.normal_(std=0.1)
        prompts = [to_text(scene, 1) for scene in train_scenes()[:2]]
        states, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(text_encoder, tokenizer, prompts, CPU)
        ids = torch.tensor(prompt_ids(tokenizer, prompts))
        fast = encode_text(text_encoder, torch.tensor(prefix_ids(tokenizer)), ids)
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
        torch.testing.assert_close(velocity(packed(transformer), x, sigma, fast), stock, atol=1e-5, rtol=0)


def test_used_parameters_are_those_that_get_a_gradient(tokenizer) -> None:
    text_encoder, transformer = build_text_encoder(TINY, len(tokenizer), 0), build_transformer(TINY)
    ids = torch.tensor(prompt_ids(tokenizer, ["a red ring"]))
    text = encode_text(text_encoder, torch.tensor(prefix_ids(tokenizer)), ids)
    velocity(packed(transformer), torch.randn(1, 4, 3, 2, 2), torch.tensor([0.5]), text).sum().backward()
    reached = {f"transformer.{n}" for n, p in transformer.named_parameters() if p.grad is not None}
    reached |= {f"text_encoder.{n}" for n, p in text_encoder.named_parameters() if p.grad is not None}
    assert reached == set(used_parameters(transformer, text_encoder))


def test_batches_equal_single_clips() -> None:
    torch.manual_seed(0)
    vae, z = build_vae(TINY).eval(), torch.randn(3, 4, 2, 2, 2)
    with torch.no_grad():
        single = torch.cat([vae.decode(part).sample for part in z.split(1)])
        torch.testing.assert_close(vae.decode(z).sample, single, atol=1e-5, rtol=0)


def test_captions_are_wrong_as_often_as_asked_and_never_held_out() -> None:
    generator = torch.Generator().manual_seed(0)
    scenes = random_scenes(4000, generator, split="train")
    named = misnamed(scenes, 0.2, generator)
    for name in ATTRIBUTES:
        wrong = (getattr(named, name) != getattr(scenes, name)).float().mean()
        assert wrong == pytest.approx(0.2, abs=0.035)
    assert not any(scene.heldout for scene in named.scenes())
    captions = imperfect_captions(scenes[:200], Flaws(wrong_word=0), generator)
    assert [from_text(caption) for caption in captions] == scenes[:200].scenes()


def test_flaws_change_the_share_of_clips_they_claim() -> None:
    generator = torch.Generator().manual_seed(0)
    scenes = random_scenes(300, generator)
    none = Flaws(jitter_share=0, blur_share=0, noise_share=0)
    clean = CLIPS.imperfect(scenes, none, generator, CPU)
    for share in ("jitter_share", "blur_share", "noise_share"):
        spoilt = CLIPS.imperfect(scenes, replace(none, **{share: 0.4}), generator, CPU)
        changed = (spoilt != clean).flatten(1).any(1).float().mean()
        assert changed == pytest.approx(0.4, abs=0.1)


def test_strengths_are_standard_deviations_of_each_clip() -> None:
    wobble = jitter(torch.tensor([0.0, 0.1]).repeat(250), 9, torch.Generator().manual_seed(0))
    assert wobble[::2].abs().max() == 0
    assert wobble[1::2].std().item() == pytest.approx(0.1, rel=0.05)
    points = torch.zeros(3, 1, 33, 33, 3)
    points[:, 0, 16, 16] = 1
    spread = blur(points, torch.tensor([0.0, 1.0, 2.0]))[:, 0, :, :, 0]
    at = torch.arange(33) - 16.0
    assert torch.equal(spread[0], points[0, 0, :, :, 0])
    assert spread.sum((1, 2)).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert (spread.sum(1) * at.square()).sum(1).tolist() == pytest.approx([0, 1, 4], rel=0.05)
    assert torch.allclose(
        spread[1:2], blur(points[1:2], torch.tensor([1.0]))[:, 0, :, :, 0], atol=1e-6
    )  # whatever is beside it


def test_sigmas_cover_the_whole_path() -> None:
    sigma = draw_sigma(20000, 3.0, CPU)
    assert (torch.histc(sigma, 10, 0, 1) > 600).all()


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(1.0, i / 100) for i in range(101)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[peak] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.01)


def _toy(steps: int, folder: Path, *, resume: bool = False) -> Trainer:
    weight = torch.nn.Parameter(torch.tensor([4.0, -2.0]))
    return Trainer(
        "toy",
        PretrainOptions(out=folder, resume=resume),
        parameters={"weight": weight},
        loss=lambda inputs: {"loss": (weight - inputs["goal"]).square().sum()},
        batches=lambda progress: {"goal": torch.tensor([1.0, 1.0])},
        minutes=1,
        steps=steps,
        peak_lr=0.1,
        weight_decay=0.0,
        average=0.9,
    )


def test_resume_continues_exactly(tmp_path: Path) -> None:
    whole = _toy(30, tmp_path / "whole")
    whole.run()
    first = _toy(30, tmp_path / "parts")
    for _ in range(12):
        first._advance()
    first.save()
    second = _toy(30, tmp_path / "parts", resume=True)
    assert second.steps == 12
    second.run()
    assert torch.equal(second.parameters["weight"], whole.parameters["weight"])
    assert torch.equal(second.averaged["weight"], whole.averaged["weight"])


def test_a_loss_that_breaks_is_reported(tmp_path: Path) -> None:
    trainer = _toy(3, tmp_path)
    with torch.no_grad():
        trainer.parameters["weight"].fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.run()


@pytest.mark.slow
def test_short_run_lowers_its_loss_and_saves_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from diffusers import HunyuanVideo15Pipeline

    options = PretrainOptions(
        out=tmp_path,
        vae_steps=12,
        flow_steps=60,
        vae_batch=2,
        flow_batch=8,
        vae_clips=4,
        flow_clips=120,
        latent_channels=4,
        vae_channels="8,8,8,8",
        heads=1,
        blocks=1,
        score_prompts=2,
        score_steps=2,
        report_seconds=0,
        device="cpu",
    )
    assert pretrain(options, MAKER) == 0
    printed = capsys.readouterr().out
    for stage, few in (("vae", 3), ("flow", 15)):
        losses = [
            float(line.split(" loss ")[1].split()[0])
            for line in printed.splitlines()
            if line.startswith(f"[{stage}] step")
        ]
        assert sum(losses[-few:]) < 0.95 * sum(losses[:few]), losses
    folder = tmp_path / "pipeline"
    pipe = HunyuanVideo15Pipeline.from_pretrained(folder)
    assert {part.dtype for part in (pipe.vae, pipe.transformer, pipe.text_encoder)} == {torch.float32}
    video = pipe("a red ring", num_frames=9, height=32, width=32, num_inference_steps=2, output_type="pt").frames
    assert video.shape == (1, 9, 3, 32, 32)
    assert torch.isfinite(video).all()
    assert str(tmp_path) not in "".join(path.read_text() for path in folder.rglob("*.json"))
    assert "| TA/shape |" in (folder / "README.md").read_text()

    again = replace(options, resume=True, score_prompts=0)
    pretrain(again, MAKER)
    assert "[flow] resumed at step 60" in capsys.readouterr().out
