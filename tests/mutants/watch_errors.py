"""Errors of the sentinel that others planted and no test saw, and of what keeps doubtful weights from becoming the best."""

from __future__ import annotations

from mutants.mutant import Mutant

LAWS = "train/test_sentinel_laws.py::"
CREEPS = (f"{LAWS}test_what_creeps_is_compared_with_the_start",)
EXPLODES = (f"{LAWS}test_an_exploded_spread_is_told_as_a_vanished_one_is",)
LIMIT = (f"{LAWS}test_the_limit_of_an_exploded_spread",)
FEW = (f"{LAWS}test_a_reward_that_few_clips_get_does_not_explode_when_more_do",)
FAILED = (f"{LAWS}test_a_part_that_could_not_be_scored_is_not_one_that_scored_nothing",)
SUMS = (f"{LAWS}test_sums_and_means_leave_out_what_could_not_be_scored",)
APART = (f"{LAWS}test_totals_that_are_far_apart_are_told_at_their_evaluation_and_remembered_as_no_best",)
PROMPTS = (f"{LAWS}test_few_prompts_scatter_by_themselves",)
BEST = (f"{LAWS}test_the_best_weights_are_never_those_of_an_evaluation_in_doubt",)
STEPS = (f"{LAWS}test_findings_about_steps_leave_the_best_alone",)

ROWS = (
    Mutant(
        "a vanished spread is compared with the recent one",
        "train/signs.py",
        'known, now = values(past.start, "reward/group_std"), row.get("reward/group_std")',
        'known, now = values(past.recent, "reward/group_std"), row.get("reward/group_std")',
        CREEPS,
    ),
    Mutant(
        "the likeness of clips is compared with the recent one",
        "train/signs.py",
        'known, now = values(past.start, "video/spread")',
        'known, now = values(past.recent, "video/spread")',
        CREEPS,
    ),
    Mutant(
        "an exploded spread is compared with the recent one",
        "train/signs.py",
        'sorted(values(past.start, "reward/group_std"))',
        'sorted(values(past.recent, "reward/group_std"))',
        CREEPS,
    ),
    Mutant(
        "an exploded spread is not looked for",
        "train/signs.py",
        "        spread_vanished,\n        spread_exploded,\n",
        "        spread_vanished,\n",
        EXPLODES,
    ),
    Mutant(
        "a spread that explodes within the first window becomes the start's",
        "train/sentinel.py",
        "start=self.start[:begun] if begun > 0 else self.start,",
        "start=self.start,",
        EXPLODES,
    ),
    Mutant(
        "a spread explodes when it is as large as it was",
        "train/signs.py",
        "or now < EXPLODED * most:",
        "or now < most:",
        LIMIT,
    ),
    Mutant(
        "rounding is a spread that can explode",
        "train/signs.py",
        "if most <= max(TINY, ROUNDING * size) or",
        "if most <= TINY or",
        FEW,
    ),
    Mutant(
        "an outlier of the start hides an explosion",
        "train/signs.py",
        "most, size = known[-2],",
        "most, size = known[-1],",
        (f"{LAWS}test_an_outlier_of_the_start_does_not_hide_what_comes_later",),
    ),
    Mutant(
        "the robust deviation lacks its factor",
        "train/signs.py",
        "return middle, 1.4826 * median(",
        "return middle, median(",
        (f"{LAWS}test_the_robust_deviation_is_the_standard_deviation_where_figures_are_normal",),
    ),
    Mutant(
        "the range of a figure has another number of deviations",
        "train/signs.py",
        "limit = max(middle + past.deviations * deviation,",
        "limit = max(middle + 6.0 * deviation,",
        (f"{LAWS}test_a_figure_is_out_of_range_beyond_so_many_standard_deviations",),
    ),
    Mutant(
        "a figure is out of range by a factor alone",
        "train/signs.py",
        "limit = max(middle + past.deviations * deviation, middle + math.log(GROWS[name]))",
        "limit = middle + math.log(GROWS[name])",
        (f"{LAWS}test_a_figure_is_out_of_range_beyond_so_many_standard_deviations",),
    ),
    Mutant(
        "running away is measured from an old row",
        "train/sentinel.py",
        "newest=self.recent[-1] if self.recent else {},",
        "newest=before[-1] if before else {},",
        (f"{LAWS}test_a_jump_of_the_weights_is_no_run",),
    ),
)

MANUAL = (f"{LAWS}test_the_limits_are_those_of_the_manual",)
MORE = (f"{LAWS}test_signs_that_need_more_than_one_figure",)
AGAIN = (f"{LAWS}test_findings_are_acted_on_again_while_they_last_and_forgotten_by_going_back",)
SURE = (f"{LAWS}test_how_sure_a_lost_part_must_be",)
LIMITS = (
    Mutant("clips become alike unseen", "train/signs.py", "ALIKE = 0.2", "ALIKE = 0.15", MANUAL),
    Mutant("a spread vanishes unseen", "train/signs.py", "VANISHED = 0.05", "VANISHED = 0.04", MANUAL),
    Mutant("rewards fail unseen", "train/signs.py", "FAILING = 0.1\n", "FAILING = 0.25\n", MANUAL),
    Mutant("steps are rounded away unseen", "train/signs.py", "STUCK = 0.01", "STUCK = 0.005", MANUAL),
    Mutant("weights run away unseen", "train/signs.py", "RUNS = 10.0", "RUNS = 15.0", MANUAL),
    Mutant("gradients explode unseen", "train/signs.py", '"gradient/norm": 5.0', '"gradient/norm": 8.0', MANUAL),
    Mutant(
        "the KL of a path runs away unseen", "train/signs.py", '"optimizer/kl": 10.0', '"optimizer/kl": 20.0', MANUAL
    ),
    Mutant(
        "a mean ratio is off only above 1",
        "train/signs.py",
        "abs(mean - 1.0) > RATIO_OFF",
        "mean - 1.0 > RATIO_OFF",
        MANUAL,
    ),
    Mutant(
        "ratios within the clip range are off",
        "train/signs.py",
        '"ratio/largest_log", floor=past.clip)',
        '"ratio/largest_log")',
        MORE,
    ),
    Mutant(
        "weights without a gradient are stuck",
        "train/signs.py",
        "if moved is None or not norm or moved >= STUCK:",
        "if moved is None or norm is None or moved >= STUCK:",
        MORE,
    ),
    Mutant("a run of two rows has a past", "train/signs.py", "LEAST_PAST = 5", "LEAST_PAST = 3", MORE),
    Mutant(
        "a finding is acted on once",
        "train/sentinel.py",
        "over >= 0 and over % max(1, self._again(name)) == 0",
        "over == 0",
        AGAIN,
    ),
    Mutant(
        "what is found after going back is not told again",
        "train/sentinel.py",
        "        self.rollbacks, self.brake, self.good = done\n        self.streaks = {}\n",
        "        self.rollbacks, self.brake, self.good = done\n",
        (f"{LAWS}test_going_back_ends_every_streak",),
    ),
    Mutant(
        "held-out parts are lost sooner",
        "train/parts.py",
        "FELL, FELL_TWICE, NEARLY = 4.0, 3.25, 2.5",
        "FELL, FELL_TWICE, NEARLY = 3.25, 3.25, 2.5",
        SURE,
    ),
    Mutant(
        "twice is as sure as once",
        "train/parts.py",
        "FELL, FELL_TWICE, NEARLY = 4.0, 3.25, 2.5",
        "FELL, FELL_TWICE, NEARLY = 4.0, 3.0, 2.5",
        SURE,
    ),
    Mutant(
        "weights are good until a part is told",
        "train/parts.py",
        "FELL, FELL_TWICE, NEARLY = 4.0, 3.25, 2.5",
        "FELL, FELL_TWICE, NEARLY = 4.0, 3.25, 3.25",
        SURE,
    ),
    Mutant(
        "the best of a part is certain",
        "train/parts.py",
        "FALLEN * math.sqrt(doubt + best[1])",
        "FALLEN * math.sqrt(doubt + 1e-12)",
        (f"{LAWS}test_the_best_of_a_part_has_a_scatter_of_its_own",),
    ),
)

PARTS = (
    Mutant(
        "the best of a part is looked for in every row",
        "train/parts.py",
        "if self.rows % self.window == 0 and (best",
        "if (best",
        (f"{LAWS}test_the_best_of_a_part_is_that_of_whole_windows",),
    ),
    Mutant(
        "a held-out part that failed reads as zero",
        "train/parts.py",
        "now = [None if value is None else sign * value for",
        "now = [sign * (value or 0.0) for",
        FAILED,
    ),
    Mutant(
        "a part of a witness that failed reads as zero",
        "train/paired.py",
        "        None\n        if any(value is None for value in clip)\n        else sum(weight * value for",
        "        sum(weight * (value or 0.0) for",
        SUMS,
    ),
    Mutant(
        "a prompt's clip that failed reads as zero",
        "train/paired.py",
        "prompts = [finite(column[start : start + clips]) for",
        "prompts = [[value or 0.0 for value in column[start : start + clips]] for",
        SUMS,
    ),
)

EVALUATIONS = (
    Mutant(
        "witnesses are ignored in what has begun to fall",
        "train/sentinel.py",
        "for title in series if title in self.held_out}\n        self.falling",
        'for title in ("total",) if title in self.held_out}\n        self.falling',
        (f"{LAWS}test_weights_at_which_a_witness_has_begun_to_fall_are_none_to_go_back_to",),
    ),
    Mutant(
        "held-out totals may be as far apart as they like",
        "train/sentinel.py",
        '"held_out_exploded": exploded,',
        '"held_out_exploded": "",',
        APART,
    ),
    Mutant(
        "a broken evaluation is remembered as the best",
        "train/sentinel.py",
        "for title, now in series.items() if not exploded else ():",
        "for title, now in series.items():",
        APART,
    ),
    Mutant(
        "parts of a broken evaluation are remembered as the best",
        "train/sentinel.py",
        '"" if exploded else self._part_fell(scores, per_prompt)',
        "self._part_fell(scores, per_prompt)",
        APART,
    ),
    Mutant(
        "two prompts explode by chance",
        "train/sentinel.py",
        "EXPLODED ** max(1.0, 4 / (prompts - 1))",
        "EXPLODED",
        PROMPTS,
    ),
    Mutant(
        "the best weights may be of an evaluation in doubt",
        "train/runner.py",
        "    if state.sentinel.doubts:\n",
        "    if False:\n",
        BEST,
    ),
    Mutant(
        "a sign is in doubt only when it is told",
        "train/sentinel.py",
        "for name, looks in self.streaks.items() if looks and name not in OF_STEPS]",
        "for name in self.open if name not in OF_STEPS]",
        BEST,
    ),
    Mutant(
        "any finding about steps keeps weights from being the best",
        "train/sentinel.py",
        "if looks and name not in OF_STEPS]",
        "if looks]",
        STEPS,
    ),
)

MUTANTS = (*ROWS, *LIMITS, *PARTS, *EVALUATIONS)
