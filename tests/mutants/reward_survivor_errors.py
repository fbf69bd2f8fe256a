"""Errors of rewards, of the judge's budget, of seeds, of what goes to the hub and of a suite's fingerprint that survived once."""

from __future__ import annotations

from mutants.mutant import Mutant

STATS = "rewards/test_video_stats.py::test_heights_are_heights_whatever_the_shape_and_the_direction"
PREFERENCE = "rewards/test_preference_models.py::test_the_options_say_which_frames_are_looked_at"
CLIP = "rewards/test_reward_clip.py::test_the_options_say_which_frames_are_looked_at"
EARLY = "rewards/test_reward_early.py::test_pieces_give_what_the_whole_gives"
JUDGE = "rewards/test_vlm_judge.py::"
HUB = "commands/test_hub.py::"
BENCH = "commands/test_bench.py::"

MUTANTS = (
    Mutant(
        "motion is measured in widths",
        "rewards/motion.py",
        "mean(dim=1) / small.shape[-2]",
        "mean(dim=1) / small.shape[-1]",
        (STATS,),
    ),
    Mutant(
        "what moves in a wide clip is looked for at the wrong places",
        "rewards/motion.py",
        "torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], dim=-1)",
        "torch.stack([(2 * x + 1) / height - 1, (2 * y + 1) / width - 1], dim=-1)",
        (STATS,),
    ),
    Mutant(
        "HPSv2 looks at as many frames a second as it likes",
        "rewards/hpsv2.py",
        'ClipEncoder(base, "", sample_fps, num_frames,',
        'ClipEncoder(base, "", 2.0, num_frames,',
        (f"{PREFERENCE}[hpsv2]",),
    ),
    Mutant(
        "HPSv2 looks at as many frames as it likes",
        "rewards/hpsv2.py",
        'ClipEncoder(base, "", sample_fps, num_frames,',
        'ClipEncoder(base, "", sample_fps, 16,',
        (f"{PREFERENCE}[hpsv2]",),
    ),
    Mutant(
        "ImageReward looks at as many frames as it likes",
        "rewards/imagereward.py",
        "self._sample_fps, self._num_frames = sample_fps, num_frames",
        "self._sample_fps, self._num_frames = sample_fps, 16",
        (f"{PREFERENCE}[imagereward]",),
    ),
    Mutant(
        "HPSv3 looks at as many frames as it likes",
        "rewards/hpsv3.py",
        "self._sample_fps, self._num_frames = sample_fps, num_frames",
        "self._sample_fps, self._num_frames = sample_fps, 4",
        ("rewards/test_hpsv3.py::test_scores_equal_the_reference_in_both_namings",),
    ),
    Mutant(
        "aesthetic heads look at as many frames as they like",
        "rewards/clip.py",
        "ClipEncoder(model, None, sample_fps, num_frames,",
        "ClipEncoder(model, None, sample_fps, 16,",
        (f"{CLIP}[Aesthetic]",),
    ),
    Mutant(
        "CLIP's encoder looks at two frames a second",
        "rewards/clip.py",
        "sample_fps=self._sample_fps, max_frames=self._num_frames",
        "sample_fps=2.0, max_frames=self._num_frames",
        (f"{CLIP}[ClipScore]",),
    ),
    Mutant(
        "OCR reads as many frames as it likes",
        "rewards/ocr.py",
        "sample_fps=self._sample_fps, max_frames=self._num_frames",
        "sample_fps=self._sample_fps, max_frames=4",
        ("rewards/test_ocr_reward.py::test_the_options_say_which_frames_are_read",),
    ),
    Mutant(
        "a rank-stabilised adapter of VideoAlign is divided by its rank",
        "rewards/videoalign_io.py",
        '(math.sqrt(rank) if lora.get("use_rslora", False) else rank)',
        "rank",
        ("rewards/test_videoalign.py::test_a_rank_stabilised_adapter_is_divided_by_the_root_of_its_rank",),
    ),
    Mutant(
        "the remarks of later batches are those of the first clips",
        "rewards/early.py",
        "remarks += [replace(one, index=one.index + count) for one in outcome.remarks]",
        "remarks += outcome.remarks",
        (EARLY,),
    ),
    Mutant(
        "the failures of later batches are those of the first clips",
        "rewards/early.py",
        "failures += [replace(one, index=one.index + count) for one in outcome.failures]",
        "failures += outcome.failures",
        (EARLY,),
    ),
    Mutant(
        "the remarks of a call go to the first clips",
        "rewards/member.py",
        "self.remarks.append(self._about(index, result.reasons[offset]))",
        "self.remarks.append(self._about(offset, result.reasons[offset]))",
        (EARLY,),
    ),
    Mutant(
        "a prompt's own seed 0 is none",
        "data/prompts.py",
        'None if seed in (None, "") else int(str(seed))',
        "int(str(seed)) if seed else None",
        ("data/test_prompts.py::test_zero_is_a_seed",),
    ),
    Mutant(
        "a list's own seed 0 is none",
        "commands/bench.py",
        "options.seed + number if own is None else",
        "options.seed + number if not own else",
        (f"{BENCH}test_a_lists_own_seeds_win",),
    ),
    Mutant(
        "a limit of cost does without the server's counts",
        "rewards/judge/vlm.py",
        "bool(allowed.max_tokens or allowed.max_cost)",
        "bool(allowed.max_tokens)",
        (f"{JUDGE}test_retries_count_as_requests_and_missing_token_counts_are_refused_where_they_matter",),
    ),
    Mutant(
        "a server that counts half of the tokens is believed",
        "rewards/judge/endpoint.py",
        'not (sent and "completion_tokens" in counts)',
        "not sent + said",
        (f"{JUDGE}test_retries_count_as_requests_and_missing_token_counts_are_refused_where_they_matter",),
    ),
    Mutant(
        "failed calls are not written down",
        "rewards/judge/vlm.py",
        "            if usage.requests:\n",
        "            if scores:\n",
        (f"{JUDGE}test_what_failed_calls_have_cost_is_known_after_a_restart",),
    ),
    Mutant(
        "a continued run forgets what failed calls have cost",
        "rewards/judge/ledger.py",
        "            self.spent.add(usage)\n            if set(",
        "            if scores:\n                self.spent.add(usage)\n            if set(",
        (f"{JUDGE}test_what_failed_calls_have_cost_is_known_after_a_restart",),
    ),
    Mutant(
        "a shorter Retry-After cancels a longer one",
        "rewards/judge/meter.py",
        "self._next = max(self._next, self._clock() + seconds)",
        "self._next = self._clock() + seconds",
        (f"{JUDGE}test_requests_take_turns_by_the_minute_and_a_hold_is_for_all",),
    ),
    Mutant(
        "the judge is told other times than those of its frames",
        "rewards/judge/vlm.py",
        'f"{index / fps:.2f}" for index in indices',
        'f"{index / self._frames.sample_fps:.2f}" for index in indices',
        (f"{JUDGE}test_the_judge_is_told_when_its_frames_are_shown",),
    ),
    Mutant(
        "the judge is told another length than the clip's",
        "rewards/judge/vlm.py",
        "Frames of one video of {clip.shape[0] / fps:.2f} s",
        "Frames of one video of {len(indices) / fps:.2f} s",
        (f"{JUDGE}test_the_judge_is_told_when_its_frames_are_shown",),
    ),
    Mutant(
        "the judge's cache does not know who answered",
        "rewards/judge/vlm.py",
        'hashlib.sha256(self._endpoint.url.geturl().encode() + b"\\n" + body)',
        "hashlib.sha256(body)",
        (f"{JUDGE}test_scores_that_were_paid_for_are_not_paid_for_again",),
    ),
    Mutant(
        "hidden files with an allowed ending are sent to the hub",
        "hub.py",
        'or any(part.startswith(".") for part in path.relative_to(folder).parts)\n',
        "\n",
        (f"{HUB}test_what_is_no_part_of_an_export_is_not_sent",),
    ),
    Mutant(
        "files in hidden folders are sent to the hub",
        "hub.py",
        'any(part.startswith(".") for part in path.relative_to(folder).parts)',
        'path.name.startswith(".")',
        (f"{HUB}test_what_is_no_part_of_an_export_is_not_sent",),
    ),
    Mutant(
        "files with any ending are sent to the hub",
        "hub.py",
        "path.suffix not in SHOWN and not",
        "not path.suffix and not",
        (f"{HUB}test_what_is_no_part_of_an_export_is_not_sent",),
    ),
    Mutant(
        "links are followed to the hub",
        "hub.py",
        "        if path.is_symlink()\n        or ",
        "        if ",
        (f"{HUB}test_a_link_to_a_file_elsewhere_is_not_sent",),
    ),
    Mutant(
        "names with brackets are left out of an upload",
        "hub.py",
        "names = [glob.escape(file.name) for file in files]",
        "names = [file.name for file in files]",
        (f"{HUB}test_exactly_what_was_listed_is_fetched_and_sent",),
    ),
    Mutant(
        "a suite's clips of other seeds are mixed",
        "commands/bench.py",
        'rows = [[clip.file, clip.prompt, clip.seed, str(clip.image or "")] for clip in clips]',
        'rows = [[clip.file, clip.prompt, str(clip.image or "")] for clip in clips]',
        (f"{BENCH}test_clips_of_other_settings_are_not_mixed",),
    ),
    Mutant(
        "a suite's clips of other prompts are mixed",
        "commands/bench.py",
        'rows = [[clip.file, clip.prompt, clip.seed, str(clip.image or "")] for clip in clips]',
        'rows = [[clip.file, clip.seed, str(clip.image or "")] for clip in clips]',
        (f"{BENCH}test_clips_of_other_settings_are_not_mixed",),
    ),
    Mutant(
        "a suite's clips of another solver are mixed",
        "commands/bench.py",
        '("bench", "kernel", "solver", "steps", "deterministic_last", "model")',
        '("bench", "kernel", "steps", "deterministic_last", "model")',
        (f"{BENCH}test_clips_of_other_settings_are_not_mixed",),
    ),
    Mutant(
        "a suite's clips of the average and of the weights themselves are mixed",
        "commands/bench.py",
        ', f"ema {found.ema}"]',
        "]",
        (f"{BENCH}test_the_average_and_the_weights_themselves_are_not_mixed",),
    ),
    Mutant(
        "a suite's clips of two checkpoints are mixed",
        "commands/bench.py",
        "for folder in (start, found.lora, found.checkpoint) if folder",
        "for folder in (start, found.lora) if folder",
        (f"{BENCH}test_the_average_and_the_weights_themselves_are_not_mixed",),
    ),
)
