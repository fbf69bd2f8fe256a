"""VideoAlign end to end on a tiny random Qwen2-VL in the authors' layout."""

from __future__ import annotations

import json
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_reward_checkpoints import NORMS, TEMPLATE, read_by_qwen, reference_model, write_videoalign

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.built_in.qwen import PAD_TOKEN, read_template, transformers_names
from sage_grpo.rewards.built_in.qwen import target_size as qwen_size
from sage_grpo.rewards.built_in.videoalign import (
    MIN_PIXELS,
    SPECIAL_TOKENS,
    VideoAlign,
    find_checkpoint,
    frame_indices,
    read_config,
    read_state,
)
from sage_grpo.rewards.functions import RewardConfigError

TOLERANCE = 2e-4
target_size = partial(qwen_size, min_pixels=MIN_PIXELS)
LAYOUTS = [
    ("adapter", 1),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (("whole_lora", 3), ("whole", 1))),
]
PROMPTS = ["a red ball", "a much longer prompt about two blue squares that cross each other"]


@pytest.fixture
def good(spec) -> dict[str, str]:
    return dict(spec("videoalign").options)


@pytest.fixture
def folder(good) -> Path:
    return Path(good["checkpoint"])


def clips(count: int = 2, frames: int = 9, size: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    coarse = torch.randint(0, 256, (count, frames, size // 8, size // 8, 3), generator=generator)
    return coarse.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).to(torch.uint8)


def reference_scores(made, clip: torch.Tensor, prompt: str, fps: float, **given: None) -> torch.Tensor:
    """One clip alone, written out: peft's model, plain patches, plain positions, head at the three tokens."""
    model, head, tokenizer = made
    size = target_size(clip.shape[1], clip.shape[2], max_pixels=200704)
    frames = clip[frame_indices(clip.shape[0], fps, fps=2)].permute(0, 3, 1, 2).float()
    frames = torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=True).clamp(0, 255).round() / 255
    inner = model.base_model.model.model if hasattr(model, "peft_config") else model.model
    tokens = [f"<|{part}_reward|>" for part in NORMS]
    read = read_by_qwen(inner, tokenizer, frames, TEMPLATE.format(text_prompt=prompt), tokens, **given)
    return torch.stack([hidden @ row for hidden, row in zip(read, head.expand(3, -1))])


def test_a_prompt_with_a_special_token_is_refused_and_masked_alone(spec):
    composite = CompositeReward([spec("videoalign")])
    prompts = ["a {text_prompt} and {0} and {video}", "bad <|TA_reward|>", "bad <|im_end|>"]
    scores, report = composite.score(clips(3, frames=4), prompts, 4.0)
    assert scores.valid.tolist() == [True, False, False]
    assert all(one.prompt.removeprefix("bad ") in one.reason for one in report.failures)


def test_the_latest_checkpoint_wins_and_of_its_files_the_safest(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-11").write_text("not a folder")
    assert find_checkpoint(tmp_path).name == "checkpoint-10"
    place, one = tmp_path / "checkpoint-10", torch.ones(1)
    save_file({"model.a.lora_A.weight": one}, place / "adapter_model.safetensors")
    with pytest.raises(RewardConfigError, match=r"needs model\.pth"):
        read_state(place)
    torch.save({"rm_head.weight": one}, place / "non_lora_state_dict.pth")
    assert read_state(place) == ({"rm_head.weight": one, "language_model.a.lora_A.weight": one}, False)
    torch.save({"rm_head.weight": 2 * one}, place / "model.pth")
    assert read_state(place) == ({"rm_head.weight": 2 * one}, True)
    save_file({"rm_head.weight": 3 * one}, place / "model.safetensors")
    assert read_state(place) == ({"rm_head.weight": 3 * one}, True)


def test_the_authors_names_become_those_of_transformers_5():
    """Of peft's copies the trained one counts; a base's embeddings may come with the adapter."""
    ours = {
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": "language_model.layers.0.self_attn.q_proj.weight",
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight": "language_model.layers.0.mlp.up_proj.lora_B.weight",
        "base_model.model.model.embed_tokens.modules_to_save.default.weight": "language_model.embed_tokens.weight",
        "base_model.model.visual.merger.mlp.0.bias": "visual.merger.mlp.0.bias",
        "model.language_model.norm.weight": "language_model.norm.weight",
    }
    given = {name: torch.tensor(float(number)) for number, name in enumerate(ours)}
    found = transformers_names({**given, "base_model.model.model.embed_tokens.original_module.weight": torch.zeros(1)})
    assert found == {ours[name]: value for name, value in given.items()}


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/sage_grpo_must_not_exist", "w"))


def test_the_template_is_parsed_not_run_and_checked(tmp_path):
    template = tmp_path / "prompt_template.py"
    template.write_text(f"raise SystemExit('never executed')\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = {TEMPLATE!r}\n")
    name = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
    read = partial(read_template, strings=[name], tokens=SPECIAL_TOKENS, source="prompt_template.py")
    assert read(template) == TEMPLATE
    text = tmp_path / "template.txt"
    text.write_text(TEMPLATE)
    assert read(text) == TEMPLATE  # the newlines at both ends are kept
    text.write_text(TEMPLATE + "<|VQ_reward|>")
    with pytest.raises(RewardConfigError, match="once"):
        read(text)
    text.write_text("{text_prompt} <|MQ_reward|> <|VQ_reward|> <|TA_reward|>")  # scores would change their names
    with pytest.raises(RewardConfigError, match="in this order"):
        read(text)
    with pytest.raises(RewardConfigError, match=f"Did you mean '{name}'"):
        read(template, strings=["DETAILED_PROMPT_WITH_SPECIAL_TOKENS"])


@pytest.mark.parametrize(("kind", "output_dim"), LAYOUTS)
def test_scores_equal_the_reference_for_every_layout(kind, output_dim, good, tmp_path):
    made = reference_model(Path(good["base"]), lora=kind != "whole", output_dim=output_dim)
    files = {**good, "checkpoint": str(write_videoalign(tmp_path, *made[:2], kind=kind))}
    reward, videos = VideoAlign(**files, normalize=False), clips()
    parts = reward(videos, PROMPTS, 4.0)
    expected = torch.stack([reference_scores(made, clip, prompt, 4.0) for clip, prompt in zip(videos, PROMPTS)])
    ours = torch.stack([parts[name] for name in NORMS], dim=1)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(parts["Overall"], expected.sum(dim=1), atol=3 * TOLERANCE, rtol=0)
    batch = reward._chat.batch(PROMPTS, [torch.zeros(2, 3, 28, 28)] * 2)
    padding = batch["input_ids"] == reward._chat.tokenizer.convert_tokens_to_ids(PAD_TOKEN)
    assert torch.equal(batch["attention_mask"], 1 - padding.long())
    assert padding.any(1).tolist() == [True, False]
    assert ours.std() > 0.1  # the scores do depend on the input
    wrong = reference_scores(made, videos[0], PROMPTS[0], 4.0, position_ids=None)
    assert (ours[0] - wrong).abs().max() > 0.01  # positions are flat: the 3-D index would be seen
    normalised = VideoAlign(**files)(videos[:1], PROMPTS[:1], 4.0)
    for part, (mean, std) in NORMS.items():
        torch.testing.assert_close(normalised[part], (parts[part][:1] - mean) / std, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(normalised["Overall"], sum(normalised[part] for part in NORMS))


def configured(folder: Path, to: Path, *without: str, **changes: object) -> Path:
    config = json.loads((folder / "model_config.json").read_text())
    for part in config.values():
        part |= {name: value for name, value in changes.items() if name in part}
        for name in without:
            part.pop(name, None)
    config["peft_lora_config"] |= {
        name: value for name, value in changes.items() if name.startswith(("num_lora", "mega"))
    }
    (to / "model_config.json").write_text(json.dumps(config))
    return to


def test_what_is_looked_at_comes_from_the_released_configuration(folder, tmp_path):
    changes = {"fps": 4, "num_frames": 6, "max_frame_pixels": 50176, "num_lora_modules": 2, "lora_r": 9}
    read = read_config(configured(folder, tmp_path, **changes))
    assert (read.fps, read.num_frames, read.max_pixels, read.lora_everywhere) == (4, 6, 50176, False)
    assert read.lora_scale == pytest.approx(12 / 9)
    changes = {"num_lora_modules": -1, "lora_r": 9, "use_rslora": True}
    read = read_config(configured(folder, tmp_path, "fps", "num_frames", "max_frame_pixels", **changes))
    assert (read.fps, read.num_frames, read.max_pixels, read.lora_everywhere) == (2.0, None, 448 * 448, True)
    assert read.lora_scale == pytest.approx(12 / 3)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"lora_alpha": 1e308}, "peft_lora_config has"),
        ({"use_rslora": "x"}, "peft_lora_config has"),
        ({"megatron_core": "x"}, "peft_lora_config has"),
        ({"output_dim": 2}, "output_dim"),
    ],
)
def test_a_configuration_that_no_release_has_is_refused(wrong, why, folder, tmp_path):
    with pytest.raises(RewardConfigError, match=why):
        read_config(configured(folder, tmp_path, **wrong))


def test_checkpoints_and_bases_that_do_not_belong_together_are_refused(tmp_path, folder, good):
    broken = shutil.copytree(folder, tmp_path / "broken")
    configured(folder, broken, lora_enable=False)
    with pytest.raises(RewardConfigError, match="lora_enable"):
        VideoAlign(**{**good, "checkpoint": str(broken)})
    adapted = shutil.copytree(good["base"], tmp_path / "base")
    (adapted / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        VideoAlign(**{**good, "base": str(adapted)})


def test_weights_cannot_run_code(tmp_path, folder, good):
    evil = shutil.copytree(folder, tmp_path / "evil")
    torch.save({"rm_head.weight": Evil()}, evil / "checkpoint-11" / "non_lora_state_dict.pth")
    pickled = shutil.copytree(good["base"], tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Evil()}, pickled / "pytorch_model.bin")
    for changed in ({"checkpoint": str(evil)}, {"base": str(pickled)}):
        with pytest.raises(pickle.UnpicklingError):
            VideoAlign(**{**good, **changed})
    assert not Path("/tmp/sage_grpo_must_not_exist").exists()


def test_number_of_frames():
    """As many as fit two a second, an even number of at least 4, from the first to the last; no more than there are."""
    counts = {(81, 24): 6, (81, 16): 10, (20, 8): 4, (28, 8): 8, (5, 24): 4, (3, 24): 2, (2000, 1): 768}
    for (frames, fps), count in counts.items():  # 6.75, 10.125; halves of 2.5 and 3.5 go to the even number
        assert frame_indices(frames, fps, fps=2) == torch.linspace(0, frames - 1, count).round().long().tolist()
    assert len(frame_indices(81, 24, fps=2, num_frames=7)) == 8
    assert len(frame_indices(5, 24, fps=2, num_frames=8)) == 5
    with pytest.raises(ValueError, match="at least 2 frames"):
        frame_indices(1, 24, fps=2)


def test_sizes():
    sizes = {
        (480, 832): (336, 588),  # too big: scaled down and floored
        (64, 64): (336, 336),  # small clips are enlarged: ceil
        (336, 308): (336, 308),
        (28, 5600): (28, 5600),  # one patch is enough
    }
    for size, expected in sizes.items():
        assert target_size(*size, max_pixels=448 * 448) == expected
        assert target_size(*size[::-1], max_pixels=448 * 448) == expected[::-1]
    with pytest.raises(ValueError, match="beyond 200"):
        target_size(5601, 28, max_pixels=448 * 448)
    with pytest.raises(ValueError, match="too narrow"):
        target_size(28, 5600, max_pixels=224 * 224)
