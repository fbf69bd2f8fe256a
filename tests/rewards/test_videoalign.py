"""VideoAlign end to end on a tiny random Qwen2-VL in the authors' layout."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_reward_checkpoints import (
    NORMS,
    TEMPLATE,
    naive_patches,
    reference_model,
    write_qwen_base,
    write_videoalign,
)

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.built_in.qwen import patchify, read_template
from sage_grpo.rewards.built_in.qwen import target_size as qwen_size
from sage_grpo.rewards.built_in.videoalign import (
    MIN_PIXELS,
    SPECIAL_TOKENS,
    VideoAlign,
    find_checkpoint,
    frame_indices,
    pixel_frames,
    read_config,
)
from sage_grpo.rewards.frames import CLIP_PIXELS
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec

TOLERANCE = 2e-4
target_size = partial(qwen_size, min_pixels=MIN_PIXELS)
PROMPTS = ["a red ball", "a much longer prompt about two blue squares that cross each other", "x"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_qwen_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("template") / "prompt_template.py"
    path.write_text(f"raise SystemExit('never executed')\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = {TEMPLATE!r}\n")
    return path


@pytest.fixture(scope="module", params=[("adapter", 1), ("adapter", 3), ("whole_lora", 3), ("whole", 1)])
def case(request, base, tmp_path_factory):
    kind, output_dim = request.param
    model, head, tokenizer = reference_model(base, lora=kind != "whole", output_dim=output_dim)
    folder = write_videoalign(tmp_path_factory.mktemp("videoalign"), model, head, kind=kind)
    return folder, model, head, tokenizer


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory) -> Path:
    model, head, _ = reference_model(base, lora=True, output_dim=3)
    return write_videoalign(tmp_path_factory.mktemp("videoalign"), model, head, kind="adapter")


def clips(count: int = 3, frames: int = 9, size: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    coarse = torch.randint(0, 256, (count, frames, size // 8, size // 8, 3), generator=generator)
    return coarse.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).to(torch.uint8)


def reference_scores(case, clip: torch.Tensor, prompt: str, fps: float, *, rope_3d: bool = False) -> torch.Tensor:
    """One clip alone, written out: peft's model, plain patches, plain positions, head at the three tokens."""
    _, model, head, tokenizer = case
    height, width = target_size(clip.shape[1], clip.shape[2], max_pixels=200704)
    frames = clip[frame_indices(clip.shape[0], fps, fps=2)].permute(0, 3, 1, 2).float()
    frames = torch.nn.functional.interpolate(frames, (height, width), mode="bicubic", antialias=True)
    frames = frames.clamp(0, 255).round() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in CLIP_PIXELS)
    frames = (frames - mean) / std
    grid = (frames.shape[0] // 2, height // 14, width // 14)
    video = "<|video_pad|>" * (grid[0] * grid[1] * grid[2] // 4)
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        f"{video}<|vision_end|>{TEMPLATE.format(text_prompt=prompt)}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    positions = None if rope_3d else torch.arange(ids.shape[1]).view(1, 1, -1).expand(3, 1, -1)
    inner = model.base_model.model.model if hasattr(model, "peft_config") else model.model
    with torch.no_grad():
        hidden = inner(
            input_ids=ids,
            position_ids=positions,
            pixel_values_videos=naive_patches(frames),
            video_grid_thw=torch.tensor([grid]),
            mm_token_type_ids=(ids == tokenizer.convert_tokens_to_ids("<|video_pad|>")).int() * 2,
            use_cache=False,
        ).last_hidden_state[0]
    names = [f"<|{part}_reward|>" for part in NORMS]
    scores = []
    for index, name in enumerate(names):
        place = ids[0].tolist().index(tokenizer.convert_tokens_to_ids(name))
        row = head[index] if head.shape[0] == 3 else head[0]
        scores.append(hidden[place] @ row)
    return torch.stack(scores)


def test_scores_equal_the_reference_for_every_layout(case, base, template):
    reward = VideoAlign(checkpoint=str(case[0]), base=str(base), template=str(template), normalize=False)
    videos = clips()
    parts = reward(videos, PROMPTS, 4.0)
    expected = torch.stack([reference_scores(case, clip, prompt, 4.0) for clip, prompt in zip(videos, PROMPTS)])
    ours = torch.stack([parts[name] for name in NORMS], dim=1)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(parts["Overall"], expected.sum(dim=1), atol=3 * TOLERANCE, rtol=0)
    assert ours.std() > 0.1  # the scores do depend on the input


def test_positions_are_one_dimensional_on_all_axes(case, base, template):
    reward = VideoAlign(checkpoint=str(case[0]), base=str(base), template=str(template), normalize=False)
    batch = reward.prepare(clips(2), PROMPTS[:2], 4.0)
    length = batch["input_ids"].shape[1]
    assert torch.equal(batch["position_ids"], torch.arange(length).expand(3, 2, length))
    wrong = reference_scores(case, clips()[0], PROMPTS[0], 4.0, rope_3d=True)
    ours = torch.stack([reward(clips(1), PROMPTS[:1], 4.0)[name][0] for name in NORMS])
    assert (ours - wrong).abs().max() > 0.01  # the 3-D index would be seen


def test_scores_do_not_depend_on_batch_size_or_padding(folder, base, template):
    options = {"checkpoint": str(folder), "base": str(base), "template": str(template)}
    weights = {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}
    totals = []
    for size in (1, 2, 3):
        spec = RewardSpec(name="videoalign", weights=weights, options=options, batch_size=size)
        totals.append(CompositeReward([spec]).score(clips(), PROMPTS, 4.0)[0].total)
    torch.testing.assert_close(totals[0], totals[1], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(totals[0], totals[2], atol=TOLERANCE, rtol=0)


def test_padding_is_right_and_masked_although_the_tokenizer_pads_left(folder, base, template):
    reward = VideoAlign(checkpoint=str(folder), base=str(base), template=str(template))
    batch = reward.prepare(clips(), PROMPTS, 4.0)
    lengths = batch["attention_mask"].sum(dim=1)
    assert len(set(lengths.tolist())) == 3
    for row, mask, length in zip(batch["input_ids"], batch["attention_mask"], lengths):
        assert mask[:length].all()
        assert not mask[length:].any()
        assert (row[length:] == reward._chat.tokenizer.convert_tokens_to_ids("<|endoftext|>")).all()


def test_normalised_scores_and_overall(folder, base, template):
    make = {"checkpoint": str(folder), "base": str(base), "template": str(template)}
    raw = VideoAlign(**make, normalize=False)(clips(), PROMPTS, 4.0)
    normalised = VideoAlign(**make)(clips(), PROMPTS, 4.0)
    for part, (mean, std) in NORMS.items():
        torch.testing.assert_close(normalised[part], (raw[part] - mean) / std)
    torch.testing.assert_close(normalised["Overall"], sum(normalised[part] for part in NORMS))


def test_a_prompt_with_a_special_token_is_refused_and_masked_alone(folder, base, template):
    spec = RewardSpec(
        name="videoalign",
        weights={"TA": 1.0},
        options={"checkpoint": str(folder), "base": str(base), "template": str(template)},
    )
    composite = CompositeReward([spec])
    for token in ("<|TA_reward|>", "<|im_end|>", "<|video_pad|>"):
        scores, report = composite.score(clips(), ["fine", f"bad {token}", "fine"], 4.0)
        assert scores.valid.tolist() == [True, False, True]
        assert token in report.failures[0].reason
    assert composite.try_out("fine") == ""  # the small clip fits
    assert "special token" in composite.try_out("bad <|im_end|>")
    braces = composite.score(clips(1), ["a {text_prompt} and {0} and {video}"], 4.0)[0]
    assert braces.valid.all()


def test_the_latest_checkpoint_wins_and_model_pth_wins_over_the_adapter(tmp_path, base, template):
    model, head, _ = reference_model(base, lora=True, output_dim=3)
    write_videoalign(tmp_path, model, head, kind="adapter", step=9)
    write_videoalign(tmp_path, model, 2 * head, kind="adapter", step=10)
    make = {"base": str(base), "template": str(template), "normalize": False}
    old = VideoAlign(checkpoint=str(tmp_path), step=9, **make)(clips(1), PROMPTS[:1], 4.0)["VQ"]
    new = VideoAlign(checkpoint=str(tmp_path), **make)(clips(1), PROMPTS[:1], 4.0)["VQ"]
    torch.testing.assert_close(new, 2 * old, atol=1e-4, rtol=1e-4)
    write_videoalign(tmp_path, model, 3 * head, kind="whole_lora", step=10)
    whole = VideoAlign(checkpoint=str(tmp_path), **make)(clips(1), PROMPTS[:1], 4.0)["VQ"]
    torch.testing.assert_close(whole, 3 * old, atol=1e-4, rtol=1e-4)
    with pytest.raises(RewardConfigError, match="checkpoint-7"):
        find_checkpoint(tmp_path, 7)


def test_an_adapter_may_bring_its_own_embeddings(tmp_path, base, template):
    from safetensors.torch import load_file, save_file

    model, head, _ = reference_model(base, lora=True, output_dim=3)
    write_videoalign(tmp_path, model, head, kind="adapter")
    make = {"checkpoint": str(tmp_path), "base": str(base), "template": str(template), "normalize": False}
    before = VideoAlign(**make)(clips(1), PROMPTS[:1], 4.0)
    path = tmp_path / "checkpoint-11" / "adapter_model.safetensors"
    adapter = load_file(path)
    rows = model.state_dict()["base_model.model.model.language_model.embed_tokens.weight"].clone()
    adapter["base_model.model.lm_head.weight"] = rows.clone()
    rows[-3:] += 1.0  # only the three special tokens
    adapter["base_model.model.model.embed_tokens.weight"] = rows
    save_file(adapter, path)
    changed = VideoAlign(**make)
    assert torch.equal(changed.model.get_input_embeddings().weight, rows)
    assert all((changed(clips(1), PROMPTS[:1], 4.0)[part] - before[part]).abs() > 1e-3 for part in NORMS)


def test_a_base_with_the_original_names_gives_the_same_scores(tmp_path, folder, base, template):
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    plain = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for name, value in weights.items()
    }
    assert {name.split(".")[0] for name in plain} <= {"model", "visual", "lm_head"}
    save_file(plain, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    make = {"checkpoint": str(folder), "template": str(template)}
    ours = VideoAlign(base=str(tmp_path / "base"), **make)(clips(1), PROMPTS[:1], 4.0)
    same = VideoAlign(base=str(base), **make)(clips(1), PROMPTS[:1], 4.0)
    assert all(torch.equal(ours[part], same[part]) for part in ours)


def test_wrong_checkpoints_are_refused(tmp_path, folder, base, template):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "model_config.json").read_text())
    config["peft_lora_config"]["lora_enable"] = False
    (broken / "model_config.json").write_text(json.dumps(config))
    with pytest.raises(RewardConfigError, match="lora_enable"):
        VideoAlign(checkpoint=str(broken), base=str(base), template=str(template))
    config["model_config"]["output_dim"] = 2
    (broken / "model_config.json").write_text(json.dumps(config))
    with pytest.raises(RewardConfigError, match="output_dim"):
        read_config(broken)


def test_what_is_looked_at_comes_from_the_released_configuration(folder, tmp_path):
    config = json.loads((folder / "model_config.json").read_text())
    config["data_config"] |= {"fps": 4, "num_frames": 6, "max_frame_pixels": 50176}
    config["peft_lora_config"]["num_lora_modules"] = 2
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    assert (read.fps, read.num_frames, read.max_pixels, read.lora_everywhere) == (4, 6, 50176, False)
    for name in ("fps", "num_frames", "max_frame_pixels"):
        del config["data_config"][name]
    config["peft_lora_config"]["num_lora_modules"] = -1
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    assert (read.fps, read.num_frames, read.max_pixels, read.lora_everywhere) == (2.0, None, 448 * 448, True)


@pytest.mark.parametrize(("stabilised", "scale"), [(False, 12 / 9), (True, 12 / 3)])
def test_a_rank_stabilised_adapter_is_divided_by_the_root_of_its_rank(stabilised, scale, folder, tmp_path):
    config = json.loads((folder / "model_config.json").read_text())
    config["peft_lora_config"] |= {"lora_r": 9, "lora_alpha": 12, "use_rslora": stabilised}
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).lora_scale == pytest.approx(scale)


class Evil:
    """A pickle that would run code."""

    def __reduce__(self):
        return (open, ("/tmp/sage_grpo_must_not_exist", "w"))


def test_pth_files_cannot_run_code(tmp_path, folder, base, template):
    import pickle

    shutil.copytree(folder, tmp_path / "evil")
    torch.save({"rm_head.weight": Evil()}, tmp_path / "evil" / "checkpoint-11" / "non_lora_state_dict.pth")
    with pytest.raises(pickle.UnpicklingError):
        VideoAlign(checkpoint=str(tmp_path / "evil"), base=str(base), template=str(template))
    assert not Path("/tmp/sage_grpo_must_not_exist").exists()


def test_the_template_is_parsed_not_run_and_checked(tmp_path, template):
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


@pytest.mark.parametrize(
    ("frames", "fps", "count"),
    [
        (81, 24, 6),  # 6.75
        (81, 16, 10),  # 10.125
        (81, 8, 20),  # 20.25
        (20, 8, 4),  # 5 -> 2.5 rounds to the even 2
        (28, 8, 8),  # 7 -> 3.5 rounds to the even 4
        (5, 24, 4),  # the minimum is 4
        (3, 24, 2),  # no more than the clip has, even
        (2000, 1, 768),
    ],
)
def test_number_of_frames(frames, fps, count):
    indices = frame_indices(frames, fps, fps=2)
    assert len(indices) == count
    assert indices[0] == 0
    assert indices[-1] == frames - 1
    assert indices == torch.linspace(0, frames - 1, count).round().long().tolist()


def test_a_single_frame_is_an_error():
    with pytest.raises(ValueError, match="at least 2 frames"):
        frame_indices(1, 24, fps=2)


def test_a_fixed_number_of_frames():
    assert len(frame_indices(81, 24, fps=2, num_frames=7)) == 8
    assert len(frame_indices(5, 24, fps=2, num_frames=8)) == 5


def test_the_same_seconds_are_read_at_8_16_and_24_fps():
    times = []
    for fps in (8, 16, 24):
        frames = 3 * fps
        times.append(torch.tensor(frame_indices(frames, fps, fps=2)) / (frames - 1))
    assert [len(row) for row in times] == [6, 6, 6]
    torch.testing.assert_close(times[0], times[2], atol=0.03, rtol=0)
    torch.testing.assert_close(times[1], times[2], atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (448, 448, (448, 448)),
        (480, 832, (336, 588)),  # too big: scaled down and floored
        (64, 64, (336, 336)),  # small clips are enlarged: ceil
        (32, 32, (336, 336)),
        (352, 624, (336, 588)),
        (336, 308, (336, 308)),
    ],
)
def test_sizes(height, width, expected):
    assert target_size(height, width, max_pixels=448 * 448) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(16, 1200), st.integers(16, 1200))
def test_sizes_are_multiples_of_28_within_the_limits(height, width):
    if max(height, width) > 6 * min(height, width):
        return
    rows, columns = target_size(height, width, max_pixels=448 * 448)
    assert rows % 28 == columns % 28 == 0
    assert rows * columns >= 100352 * 0.8
    # enlarging rounds up, so it may pass the maximum; shrinking may not
    assert rows * columns <= max(448 * 448, 100352 * 1.6)


def test_pixels_are_rounded_to_whole_values_before_normalising():
    config = read_config_like()
    pixels = pixel_frames(clips(1)[0], frame_indices(9, 4.0, fps=config.fps), config)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in CLIP_PIXELS)
    whole = (pixels * std + mean) * 255
    assert (whole - whole.round()).abs().max() < 1e-3
    assert pixels.shape[-1] == 336


def read_config_like():
    from sage_grpo.rewards.built_in.videoalign import VideoAlignConfig

    return VideoAlignConfig(
        output_dim=1, fps=2, num_frames=None, max_pixels=200704, template="", lora_scale=None, normalization=None
    )


def test_patches_equal_plain_loops_and_the_image_processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    frames = torch.randn(4, 3, 56, 84, generator=torch.Generator().manual_seed(0))
    patches, grid = patchify(frames)
    assert grid == (2, 4, 6)
    assert torch.equal(patches, naive_patches(frames))
    odd, odd_grid = patchify(frames[:3])
    assert odd_grid == (2, 4, 6)
    assert torch.equal(odd, naive_patches(torch.cat([frames[:3], frames[2:3]])))
    image = torch.randint(0, 256, (56, 84, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    theirs = Qwen2VLImageProcessorPil()(image.numpy(), do_resize=False, return_tensors="pt")
    pixels = image.permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in CLIP_PIXELS)
    pixels = (pixels - mean) / std
    ours, _ = patchify(pixels.expand(2, -1, -1, -1))
    torch.testing.assert_close(ours, theirs["pixel_values"], atol=1e-5, rtol=0)
