"""Errors in rewards, prompts and their metadata."""

from __future__ import annotations

from mutants.mutant import Mutant

BASE = "rewards/test_reward_base.py::"
INPUTS = "rewards/test_reward_inputs.py::"

MUTANTS = (
    Mutant(
        "a failed reward counts as 0",
        "rewards/base.py",
        "total[~valid] = torch.nan",
        "total[~valid] = 0.0",
        (f"{BASE}test_only_the_clip_that_fails_is_masked_and_counted",),
    ),
    Mutant(
        "a failed part counts as 0",
        "rewards/member.py",
        "torch.where(value.isfinite(), (value - mean) / std, torch.nan)",
        "torch.where(value.isfinite(), (value - mean) / std, 0.0)",
        (f"{BASE}test_only_the_clip_that_fails_is_masked_and_counted",),
    ),
    Mutant(
        "infinite rewards are learnt from",
        "rewards/member.py",
        "torch.where(value.isfinite(), (value - mean) / std, torch.nan)",
        "(value - mean) / std",
        (f"{BASE}test_infinity_is_a_failure_too",),
    ),
    Mutant(
        "standardize is ignored",
        "rewards/member.py",
        "torch.where(value.isfinite(), (value - mean) / std, torch.nan)",
        "torch.where(value.isfinite(), value, torch.nan)",
        (f"{BASE}test_standardize_is_applied_to_parts_and_total",),
    ),
    Mutant(
        "the weights of the rewards are ignored",
        "rewards/base.py",
        "total += member.weights[part] * value",
        "total += value",
        (f"{BASE}test_the_total_is_the_weighted_sum_of_the_parts",),
    ),
    Mutant(
        "metrics count in the total",
        "rewards/member.py",
        "    if spec.metric_only:\n        return {}\n",
        "",
        (f"{BASE}test_the_total_is_the_weighted_sum_of_the_parts",),
    ),
    Mutant(
        "the last reward decides alone which clips are valid",
        "rewards/base.py",
        "valid &= value.isfinite()",
        "valid = value.isfinite()",
        (f"{BASE}test_only_the_clip_that_fails_is_masked_and_counted",),
    ),
    Mutant(
        "the limit of failures is one clip too low",
        "rewards/failures.py",
        "failed > limit * total",
        "failed >= limit * total",
        (f"{BASE}test_the_limit_is_a_fraction",),
    ),
    Mutant(
        "every batch of clips is scored with the first batch's prompts",
        "rewards/member.py",
        "[clips.prompts[index] for index in chunk]",
        "list(clips.prompts[: len(chunk)])",
        (f"{BASE}test_the_reward_of_a_clip_belongs_to_its_own_prompt_in_every_batch",),
    ),
    Mutant(
        "every batch of clips is scored with the first batch's metadata",
        "rewards/member.py",
        "[dict(clips.metadata[i]) for i in chunk]",
        "[dict(clips.metadata[i]) for i in range(len(chunk))]",
        (f"{INPUTS}test_rewards_that_ask_for_metadata_get_each_clips_row",),
    ),
    Mutant(
        "a reward can spoil the clips of the next",
        "rewards/member.py",
        "if self._copies and own.device == videos.device:",
        "if self._copies and own.device != videos.device:",
        (f"{INPUTS}test_a_write_through_numpy_reaches_nobody_else",),
    ),
    Mutant(
        "rewards are told a fixed frame rate",
        "rewards/member.py",
        "for index in chunk], clips.fps, **extra)",
        "for index in chunk], 24.0, **extra)",
        (f"{BASE}test_the_total_is_the_weighted_sum_of_the_parts",),
    ),
    Mutant(
        "sharpness is a standard deviation",
        "rewards/video_stats.py",
        "1000 * edges.var(dim=1, unbiased=False)",
        "1000 * edges.std(dim=1, unbiased=False)",
        ("rewards/test_video_stats.py::test_sharpness_is_the_variance_of_the_laplacian",),
    ),
    Mutant(
        "flicker sees a steady fade",
        "rewards/video_stats.py",
        "(level[:, 2:] - 2 * level[:, 1:-1] + level[:, :-2]).abs()",
        "(level[:, 1:] - level[:, :-1]).abs()",
        ("rewards/test_video_stats.py::test_flicker_sees_alternation_but_not_a_steady_fade",),
    ),
    Mutant(
        "CLIPScore takes the best frame",
        "rewards/clip.py",
        "self._scale * kept.mean(dim=1)",
        "self._scale * kept.amax(dim=1)",
        ("rewards/test_reward_clip.py::test_clipscore_is_the_clamped_and_scaled_cosine",),
    ),
    Mutant(
        "frames are read at the start of their slices",
        "rewards/frames.py",
        "(k + 0.5) * duration / count",
        "k * duration / count",
        ("rewards/test_reward_frames.py::test_the_same_clip_is_read_at_the_same_times",),
    ),
    Mutant(
        "VideoAlign's mean and std are swapped",
        "rewards/videoalign.py",
        "scores = (scores - mean) / std",
        "scores = (scores - std) / mean",
        ("rewards/test_videoalign.py::test_normalised_scores_and_overall",),
    ),
    Mutant(
        "VideoAlign's Overall is a mean",
        "rewards/videoalign.py",
        '"Overall": scores.sum(dim=1)',
        '"Overall": scores.mean(dim=1)',
        ("rewards/test_videoalign.py::test_normalised_scores_and_overall",),
    ),
    Mutant(
        "a column with a meaning is metadata too",
        "data/prompts.py",
        "{name: value for name, value in row.items() if name not in (*COLUMNS, column)}",
        "dict(row)",
        ("data/test_prompts.py",),
    ),
    Mutant(
        "every epoch has the order of the first",
        "data/prompts.py",
        'random.Random(f"prompts/{self.seed}/{epoch}")',
        'random.Random(f"prompts/{self.seed}")',
        ("data/test_prompts.py",),
    ),
    Mutant(
        "the stream moves by one prompt, however many were taken",
        "data/prompts.py",
        "self.position += count",
        "self.position += 1",
        ("data/test_prompts.py",),
    ),
    Mutant(
        "the last update gets the steps that are left over and the others none of them",
        "data/groups.py",
        "bounds = [len(steps) * part // updates for part in range(updates + 1)]",
        "bounds = [*(len(steps) // updates * part for part in range(updates)), len(steps)]",
        ("data/test_groups.py::test_steps_are_dealt_out_evenly_and_in_order",),
    ),
)
