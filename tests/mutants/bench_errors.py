"""Errors of what goes to public suites, of pairs, and of the package's own prompts."""

from __future__ import annotations

from mutants.mutant import Mutant

BENCHES = "data/test_benches.py::"
BENCH = "commands/test_bench.py::"
PAIRS = "commands/test_pairs.py::"
SETS = "data/test_prompt_sets.py::"

MUTANTS = (
    Mutant(
        "VBench's flicker prompts have as few clips as all",
        "data/benches.py",
        "25 if FLICKER in",
        "5 if FLICKER in",
        (f"{BENCHES}test_vbench_has_five_clips_of_a_prompt_and_25_of_those_that_are_filtered",),
    ),
    Mutant(
        "VBench-2.0's names are not cut",
        "data/benches.py",
        "entry.prompt.text[:180]",
        "entry.prompt.text",
        (f"{BENCHES}test_vbench2_has_a_folder_a_dimension_and_the_first_180_characters",),
    ),
    Mutant(
        "a prompt with a slash is a folder",
        "data/benches.py",
        'if sign in "/\\\\" or',
        "if",
        (f"{BENCHES}test_prompts_that_cannot_be_file_names_are_refused_by_name",),
    ),
    Mutant(
        "base and tuned have other weights than they say",
        "commands/run_folder.py",
        'weights=None if self.run is None else "base")',
        "weights=None)",
        ("commands/test_run_folder.py::test_pairs_are_two_plain_evaluations",),
    ),
    Mutant(
        "half a clip is kept",
        "commands/bench.py",
        "file.is_file() and video_size(file) == tuple(video.values())",
        "file.is_file()",
        (f"{BENCH}test_what_is_whole_is_kept_and_the_rest_is_made_again",),
    ),
    Mutant(
        "clips of other settings are mixed",
        "commands/bench.py",
        "        if changed:",
        "        if False:",
        (f"{BENCH}test_clips_of_other_settings_are_not_mixed",),
    ),
    Mutant(
        "clips of one prompt count as independent",
        "commands/pairs.py",
        'pairs.append((one["prompt"], before, after))',
        'pairs.append((one["noise"], before, after))',
        (f"{PAIRS}test_a_prompt_counts_once_and_every_clip_can_win",),
    ),
    Mutant(
        "base minus tuned",
        "commands/pairs.py",
        "paired_interval(means[1], means[0])",
        "paired_interval(means[0], means[1])",
        (f"{PAIRS}test_a_prompt_counts_once_and_every_clip_can_win",),
    ),
    Mutant(
        "the held-out prompts may be trained on",
        "train/config.py",
        'if self.prompts == "starter_eval":',
        'if self.prompts == "starter_evil":',
        (f"{SETS}test_names_stand_for_the_sets_and_bring_their_held_out_part",),
    ),
    Mutant(
        "the starter set is evaluated on itself",
        "train/config.py",
        '"starter": "starter_eval"}',
        '"starter": "starter"}',
        (f"{SETS}test_names_stand_for_the_sets_and_bring_their_held_out_part",),
    ),
)
