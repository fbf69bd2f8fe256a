"""Subject and background consistency against VBench's loop over frames, on tiny random encoders."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_reward_checkpoints import write_dino

from sage_grpo.rewards.built_in.consistency import (
    BackgroundConsistency,
    SubjectConsistency,
    consistency,
    dino_positions,
    short_edge,
)
from sage_grpo.rewards.functions import RewardConfigError


def clips(count: int = 2, frames: int = 5, height: int = 40, width: int = 56) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, frames, height, width, 3), generator=generator, dtype=torch.uint8)


def by_the_loop(features: torch.Tensor) -> float:
    total, first, former = 0.0, None, None
    for feature in features:
        if first is None:
            first = feature
        else:
            before = max(0.0, F.cosine_similarity(former, feature, dim=0).item())
            start = max(0.0, F.cosine_similarity(first, feature, dim=0).item())
            total += (before + start) / 2
        former = feature
    return total / (len(features) - 1)


def test_the_formula_is_the_loop_over_frames_and_cuts_at_zero():
    features = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([by_the_loop(clip) for clip in features])
    torch.testing.assert_close(consistency(features), expected)
    assert (features[:, 1:] * features[:, :-1]).sum(dim=-1).min() < 0  # some cosines are below 0
    # by hand: e1, e2, e1: previous 0 and 0, first 0 and 1
    axes = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]]])
    assert consistency(axes).item() == pytest.approx((0 + 0.5) / 2)


def dino_token(model, pixels: torch.Tensor, version: int) -> torch.Tensor:
    """The class token; for DINO from its layers, with positions as its own code stretches them: 4.1 / 4 and 5.1 / 4."""
    if version == 2:
        return model(pixels).last_hidden_state[0, 0]
    parts = model.embeddings
    table = parts.position_embeddings
    grid = table[:, 1:].view(1, 4, 4, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, scale_factor=(4.1 / 4, 5.1 / 4), mode="bicubic")
    patches = F.conv2d(
        pixels, *(p for n, p in sorted(parts.patch_embeddings.named_parameters(), reverse=True)), stride=8
    )
    hidden = torch.cat([parts.cls_token + table[:, :1], (patches + grid).flatten(2).transpose(1, 2)], dim=1)
    for layer in model.layers:
        hidden = layer(hidden)
    return model.layernorm(hidden)[0, 0]


def test_frames_are_resized_as_floats_without_antialiasing_and_nothing_is_rounded():
    """VBench's loader makes floats of the frames: values lie between grey levels, and the cubic overshoots."""
    stripes = (torch.arange(24) % 2 * 255).to(torch.uint8).view(1, 1, 24, 1).expand(1, 9, 24, 3)
    plain = short_edge(stripes, 6, "bilinear")
    assert plain.shape == (1, 3, 6, 16)
    # by hand: column k is read at (k + 1/2) 24 / 16 - 1/2 between its two neighbours, whatever lies beyond them
    places = [(k + 0.5) * 1.5 - 0.5 for k in range(16)]
    by_hand = [255 * (place % 1 if int(place) % 2 == 0 else 1 - place % 1) for place in places]
    torch.testing.assert_close(plain[0, 0, 0].double(), torch.tensor(by_hand).double(), atol=1e-3, rtol=0)
    edge = (torch.arange(24) >= 12).to(torch.uint8).mul(255).view(1, 1, 24, 1).expand(1, 9, 24, 3)
    cubic = short_edge(edge, 12, "bicubic")
    assert cubic.min() < -1
    assert cubic.max() > 256


@pytest.mark.parametrize("version", [1, 2])
def test_subject_consistency_reads_dinos_class_token_of_every_frame(version, tmp_path):
    from transformers import AutoModel

    folder = write_dino(tmp_path, version=version)
    options = {"add_pooling_layer": False} if version == 1 else {}
    model = AutoModel.from_pretrained(folder, **options).eval()
    videos = clips()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    expected = []
    for clip in videos:
        # the short edge becomes 32, bilinear without antialiasing, nothing is cut off: 32 x 44
        images = F.interpolate(clip.permute(0, 3, 1, 2).float(), (32, 44), mode="bilinear", align_corners=False)
        with torch.no_grad():
            features = [dino_token(model, (image / 255 - mean)[None] / std, version) for image in images]
        expected.append(by_the_loop(torch.stack(features)))
    ours = SubjectConsistency(model=str(folder), size=32)(videos, ["a", "b"], 8.0)["subject_consistency"]
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-5, rtol=0)
    assert ours.std() > 1e-4


def test_background_consistency_reads_clips_embedding(clip_model):
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(clip_model).eval()
    videos = clips()
    mean = torch.tensor((0.48145466, 0.4578275, 0.40821073)).view(3, 1, 1)
    std = torch.tensor((0.26862954, 0.26130258, 0.27577711)).view(3, 1, 1)
    expected = []
    for clip in videos:
        images = F.interpolate(clip.permute(0, 3, 1, 2).float(), (30, 42), mode="bicubic", align_corners=False)
        pixels = (images[..., 6:36] / 255 - mean) / std
        with torch.no_grad():
            expected.append(by_the_loop(model.get_image_features(pixel_values=pixels).pooler_output))
    ours = BackgroundConsistency(model=clip_model)(videos, ["a", "b"], 8.0)["background_consistency"]
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-5, rtol=0)


def test_a_still_scores_one_one_frame_is_too_few_and_what_is_no_dino_is_refused(tmp_path, clip_model):
    reward = SubjectConsistency(model=str(write_dino(tmp_path)), size=32)
    still = clips(1, 1).expand(-1, 7, -1, -1, -1)
    assert reward(still, ["a"], 8.0)["subject_consistency"].item() == pytest.approx(1, abs=1e-5)
    alone = reward(clips(2, 1), ["a", "b"], 8.0)
    assert alone["subject_consistency"].isnan().all()
    assert "compares frames" in alone.reasons[1]
    table = torch.zeros(1, 17, 2)
    assert dino_positions(table, 4, 4) is table  # nothing is stretched
    with pytest.raises(RewardConfigError, match="is a clip"):
        SubjectConsistency(model=clip_model)
    with pytest.raises(RewardConfigError, match="sample_fps"):
        BackgroundConsistency(model=clip_model, sample_fps=-1)


def test_a_folder_with_an_adapter_is_refused_before_the_adapter_is_read(tmp_path):
    folder = write_dino(tmp_path / "dino")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b", "megatron_core": "evil"}')
    with pytest.raises(ValueError, match=r"adapter_config\.json makes an adapter"):
        SubjectConsistency(model=str(folder))
