"""Errors in what saves time: reference passes that are left out, and the profile."""

from __future__ import annotations

from mutants.mutant import Mutant

REFERENCE = "train/test_reference.py::"
LIVE = (f"{REFERENCE}test_an_anchor_that_is_the_live_policy_takes_no_pass_and_changes_no_bit[toy]",)
INERT = (f"{REFERENCE}test_a_kl_too_small_to_act_is_left_out_after_it_was_measured",)
RESUME = (f"{REFERENCE}test_a_run_that_leaves_passes_out_resumes_to_the_bit",)

MUTANTS = (
    Mutant(
        "the anchor is taken for the live policy one update too long",
        "train/anchor.py",
        "return self.renewed_at == updates",
        "return self.renewed_at >= updates - 1",
        LIVE,
    ),
    Mutant(
        "a renewal inside an iteration is overlooked",
        "train/anchor.py",
        "return self.every is not None and (updates + later) % self.every == 0",
        "return False",
        LIVE,
    ),
    Mutant(
        "an update at the anchor counts as a measurement of its KL",
        "train/reference.py",
        'elif need == "pass":',
        "else:",
        INERT,
    ),
    Mutant(
        "a KL that was not measured is logged",
        "train/reference.py",
        'if need == "inert":',
        'if need == "none":',
        INERT,
    ),
    Mutant(
        "the rest does not see that lambda grows",
        "train/reference.py",
        "return MARGIN * self.peak * kl_lambda < self.limit",
        "return MARGIN * self.peak < self.limit",
        (f"{REFERENCE}test_lambda_that_grows_beyond_what_was_measured_ends_the_rest",),
    ),
    Mutant(
        "a resumed run forgets what was measured",
        "train/state.py",
        'self.reference.load_state_dict(meta.get("reference", {}))',
        "self.reference.load_state_dict({})",
        RESUME,
    ),
    Mutant(
        "every iteration from the named one on is recorded",
        "train/runner.py",
        "if number != trainer.config.profile or not trainer.world.is_main:",
        "if trainer.config.profile is None or number < trainer.config.profile or not trainer.world.is_main:",
        ("train/test_profile.py::test_a_recorded_run_is_the_same_run_and_leaves_traces_and_a_table",),
    ),
    Mutant(
        "a profile records all passes",
        "train/profiler.py",
        "if self._ticks == self.passes:",
        "if self._ticks == 0:",
        ("train/test_profile.py::test_only_the_first_passes_are_recorded",),
    ),
)
