"""Errors of reports: what is paired with what, what is given out, what is text."""

from __future__ import annotations

from mutants.mutant import Mutant

DATA = "report/test_report_data.py::"
WATCH = "browser/test_report_watch.py::"

MUTANTS = (
    Mutant(
        "clips are paired by their prompt alone",
        "report/run_data.py",
        "return self.prompt, self.noise",
        'return self.prompt, ""',
        (f"{DATA}test_another_noise_is_another_entry",),
    ),
    Mutant(
        "gains are differences of means",
        "report/summary.py",
        "change = paired or _plain_gain",
        "change = _plain_gain",
        (f"{DATA}test_gains_are_paired_clip_by_clip_with_their_interval",),
    ),
    Mutant(
        "seeds of one experiment stay apart",
        "report/summary.py",
        'SAME = ("seed",',
        'SAME = ("seeds",',
        (f"{DATA}test_seeds_of_one_experiment_are_taken_together",),
    ),
    Mutant(
        "the tuned clip stands left",
        "report/pairs.py",
        "for clip in (left, right)]",
        "for clip in (right, left)]",
        (f"{DATA}test_before_and_after_stand_side_by_side",),
    ),
    Mutant(
        "a report that fails ends the run",
        "report/build.py",
        "except Exception as error:",
        "except KeyError as error:",
        (f"{DATA}test_a_report_that_fails_is_a_warning",),
    ),
    Mutant(
        "markup in data ends the script",
        "report/page.py",
        'for letter in "<>&',
        'for letter in "',
        (f"{DATA}test_data_stay_data_inside_the_page",),
    ),
    Mutant(
        "a watched report needs no secret",
        "report/watch.py",
        "hmac.compare_digest(told.encode(), self.server.token.encode())",
        "bool(told)",
        (f"{WATCH}test_only_the_address_with_its_secret_is_answered",),
    ),
    Mutant(
        "a request's path is opened",
        "report/watch.py",
        "file = self._names.get(name)",
        "file = self.folders[0] / name[3:]",
        (f"{WATCH}test_only_the_address_with_its_secret_is_answered",),
    ),
    Mutant(
        "clips from before training are deleted first",
        "train/samples.py",
        "return 2 if",
        "return 0 if",
        ("train/test_samples.py::test_rollouts_go_before_held_out_clips_and_those_before_training_last",),
    ),
    Mutant(
        "clips have the scores of others",
        "train/evaluate.py",
        "sorted(enumerate(table.places.long().tolist()),",
        "sorted(enumerate(table.places.long().tolist()[::-1]),",
        ("train/test_train_report.py::test_every_row_has_the_scores_of_its_own_clip",),
    ),
)
