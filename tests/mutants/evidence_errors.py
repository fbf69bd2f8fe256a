"""Errors of the suites, the leaderboard and the recipe that keeps the paper's values."""

from __future__ import annotations

from mutants.mutant import Mutant

SUITES = "lab/test_suites.py::"
BOARD = "lab/test_leaderboard.py::"
PRESETS = "train/test_trainer_presets.py::"

MUTANTS = (
    Mutant(
        "kernels at equal variance are not",
        "lab/suites/methods.py",
        '"flow": 0.56953',
        '"flow": 0.5',
        (f"{SUITES}test_matched_kernels_inject_the_variance_of_sage",),
    ),
    Mutant(
        "the equaliser suite never turns it off",
        "lab/suites/samplers.py",
        '"surrogate.equalize": on,',
        '"surrogate.equalize": True,',
        (f"{SUITES}test_every_arm_of_a_suite_builds_plans_and_differs_from_the_others[equaliser]",),
    ),
    Mutant(
        "the untrained metric is trained on",
        "lab/suites/common.py",
        '    "metric_only": True,\n    "weights": {"flicker": 0.0, "sharpness": 0.0},',
        '    "weights": {"flicker": 0.5, "sharpness": 0.0},',
        (f"{SUITES}test_the_metric_that_is_not_trained_on_counts_in_no_run[table2]",),
    ),
    Mutant(
        "dual is plain in Table 2",
        "lab/suites/methods.py",
        '    "trust_region.mode": "dual",\n    "trust_region.beta_position"',
        '    "trust_region.mode": "moving",\n    "trust_region.beta_position"',
        (f"{SUITES}test_table2_has_every_method_with_and_without_the_dual_region",),
    ),
    Mutant(
        "the leaderboard ranks by the end",
        "lab/leaderboard.py",
        'return (-math.inf if at_budget is None else at_budget["mean"], final["mean"])',
        'return (final["mean"], final["mean"])',
        (f"{BOARD}test_entries_are_ranked_at_the_budget_and_not_by_what_more_passes_buy",),
    ),
    Mutant(
        "an entry may choose the evaluation's noises",
        "lab/leaderboard.py",
        'FIXED = ("model.", "data.", "evaluate.")',
        'FIXED = ("model.", "data.")',
        (f"{BOARD}test_an_arm_that_breaks_a_rule_is_left_out_with_the_reason",),
    ),
    Mutant(
        "an entry forgets its diverged runs",
        "lab/leaderboard.py",
        "if len(known) == len(runs) else None",
        "if known else None",
        (f"{BOARD}test_a_diverged_run_costs_the_score_at_the_budget",),
    ),
    Mutant(
        "compare writes no leaderboard",
        "lab/report.py",
        "    store.write(place / leaderboard.FILE, leaderboard.encoded(leaderboard.board(suite, rows)))\n",
        "",
        (f"{BOARD}test_compare_writes_the_leaderboard",),
    ),
    Mutant(
        "a target's coefficient reaches sage_paper",
        "recipes/methods.py",
        '        kl=KlCoefficient(kind="two_stage", lambda_min=1e-7, lambda_max=1e-5, warmup_updates=100),\n',
        "",
        (f"{PRESETS}test_nothing_of_another_method_is_left_in_sage_paper",),
    ),
    Mutant(
        "the ceiling is measured before the VAE",
        "shapes/making/score.py",
        'return {"clean": clips, "after_vae": after}',
        'return {"clean": clips, "after_vae": clips}',
        ("shapes/test_ceiling.py::test_the_ceiling_is_measured_and_written",),
    ),
)
