"""Errors of the sentinel: what it overlooks, what it takes for a fault, and what it does wrong about one."""

from __future__ import annotations

from mutants.mutant import Mutant

PURE = "train/test_sentinel.py::"
RUN = "train/test_sentinel_run.py::"
AGREE = "train/test_agreement.py::"
FOUND = f"{PURE}test_a_fault_is_found_under_its_name_and_soon"

MUTANTS = (
    Mutant(
        "one outlier is a finding",
        "train/sentinel.py",
        "return self.config.patience if name not in (*AT_ONCE, *EVALUATED) else 1",
        "return 1",
        (f"{PURE}test_a_single_outlier_is_no_finding",),
    ),
    Mutant(
        "a fault becomes its own past",
        "train/sentinel.py",
        "before = self.recent[: len(self.recent) - min(self.streaks.get(name, 0), window)][-window:]",
        "before = self.recent[-window:]",
        (FOUND,),
    ),
    Mutant(
        "held-out differences are not paired",
        "train/paired.py",
        "stdev(numbers) / math.sqrt(len(numbers))",
        "0.0",
        (f"{PURE}test_what_is_within_the_scatter_of_clips_is_no_loss",),
    ),
    Mutant(
        "a witness is compared with the start only",
        "train/sentinel.py",
        'known |= {"best": now, "then": total}',
        "known |= {}",
        (f"{PURE}test_hacking_is_a_witness_that_falls_while_the_total_rises",),
    ),
    Mutant(
        "hacking without a rising total",
        "train/sentinel.py",
        "if not rise.surely(self.config.stderrs) or not lost.surely(self.config.stderrs / 2):",
        "if not lost.surely(self.config.stderrs / 2):",
        (f"{PURE}test_hacking_is_a_witness_that_falls_while_the_total_rises",),
    ),
    Mutant(
        "a witness that stalls is no reason to look",
        "train/sentinel.py",
        "or later.surely(sure / 2):",
        "or not later.surely(sure / 2):",
        (f"{PURE}test_a_witness_that_stops_following_is_told_and_not_acted_on",),
    ),
    Mutant(
        "dips of a healthy run are falls",
        "train/sentinel.py",
        'or lost.by < self.config.lost * max(gain.by, 0.0):\n            return ""\n        return (\n            f"The held-out',
        'or lost.by < 0.0:\n            return ""\n        return (\n            f"The held-out',
        (f"{PURE}test_held_out_curves_of_healthy_runs_raise_nothing",),
    ),
    Mutant(
        "the sentinel forgets at a resume",
        "train/sentinel.py",
        'self.streaks = dict(state.get("streaks", {}))',
        "self.streaks = {}",
        (f"{PURE}test_a_sentinel_goes_on_as_if_never_interrupted",),
    ),
    Mutant(
        "checkpoints have no sentinel",
        "train/state.py",
        '            "sentinel": self.sentinel.state_dict(),\n',
        '            "sentinel": {},\n',
        (f"{RUN}test_the_step_size_is_lowered_by_a_factor_that_is_saved",),
    ),
    Mutant(
        "a rollback is forgotten by going back",
        "train/sentinel.py",
        "self.rollbacks, self.brake, self.good = done",
        "del done",
        (f"{RUN}test_a_run_goes_back_to_the_recorded_checkpoint_and_ends",),
    ),
    Mutant(
        "going back keeps the step size",
        "train/state.py",
        "        self.optimizer.pace.slow_to(self.sentinel.brake)\n",
        "",
        (f"{RUN}test_the_weights_after_a_rollback_are_those_of_the_checkpoint",),
    ),
    Mutant(
        "going back counts iterations again",
        "train/state.py",
        '        self.sentinel.go_back(meta["sentinel"])\n',
        '        self.sentinel.go_back(meta["sentinel"])\n        self.iteration = int(meta["iteration"])\n',
        (f"{RUN}test_the_weights_after_a_rollback_are_those_of_the_checkpoint",),
    ),
    Mutant(
        "the good checkpoint is pruned",
        "train/runner.py",
        ", spare=state.sentinel.good)",
        ")",
        (f"{RUN}test_the_good_checkpoint_outlives_the_others",),
    ),
    Mutant(
        "weights with a sign of trouble are good",
        "train/sentinel.py",
        "return not self.falling and not any(self.streaks.values())",
        "return True",
        (f"{RUN}test_a_run_goes_back_to_the_recorded_checkpoint_and_ends",),
    ),
    Mutant(
        "a target KL works against the brake",
        "rl/pace.py",
        "            kl /= self.brake**2\n",
        "",
        (f"{RUN}test_a_target_kl_follows_the_brake",),
    ),
    Mutant(
        "stop does not stop",
        "train/runner.py",
        "stopping = world.any(run.stop.asked) or run.watch.stops",
        "stopping = world.any(run.stop.asked)",
        (f"{RUN}test_a_stop_saves_and_says_why",),
    ),
    Mutant(
        "agreement is taken over all groups",
        "train/agreement.py",
        "correlation(total[groups == g].double(), score[groups == g]) for g in groups.unique()",
        "correlation(total.double(), score) for g in groups.unique()",
        (f"{AGREE}test_agreement_is_within_groups_and_has_a_sign",),
    ),
    Mutant(
        "agreement has the wrong sign",
        "train/agreement.py",
        "return float((a * b).sum()) / math.sqrt(size)",
        "return -float((a * b).sum()) / math.sqrt(size)",
        (f"{AGREE}test_agreement_is_within_groups_and_has_a_sign",),
    ),
    Mutant(
        "agreement has no standard error",
        "train/parting.py",
        "math.sqrt(max(0.0, self.variance)) / self.iterations if self.iterations",
        "1e-9 if self.iterations",
        (f"{AGREE}test_a_steady_agreement_raises_nothing_however_low",),
    ),
    Mutant(
        "one group's agreement is certain",
        "train/agreement.py",
        "math.sqrt(max(chance, scatter) / count)",
        "math.sqrt(scatter / count)",
        (f"{AGREE}test_agreement_is_of_ranks_with_its_standard_error",),
    ),
    Mutant(
        "a rate is certain",
        "train/paired.py",
        "longer * (own - rate * step) + rate * next_step - gain",
        "rate * next_step - gain",
        (f"{AGREE}test_a_rate_that_is_not_sure_makes_a_shortfall_that_is_not",),
    ),
    Mutant(
        "what the groups say is not heard",
        "train/parting.py",
        "return held_out.sigmas if drop is None else (held_out.sigmas + drop.sigmas) / math.sqrt(2)",
        "return held_out.sigmas",
        (f"{AGREE}test_both_looks_together_see_more_than_held_out_clips_alone",),
    ),
    Mutant(
        "agreement is forgotten at a resume",
        "train/sentinel.py",
        'self.agreement, self.at_best = tallies(state.get("agreement", {})), tallies(state.get("at_best", {}))',
        'self.agreement, self.at_best = {}, tallies(state.get("at_best", {}))',
        (f"{AGREE}test_what_is_remembered_of_witnesses_survives_as_json",),
    ),
    Mutant(
        "clips of a prompt count as so many prompts",
        "train/sentinel.py",
        "{title: by_prompt(column, per_prompt) for title, column in series.items()}",
        "{title: by_prompt(column, 1) for title, column in series.items()}",
        (f"{AGREE}test_clips_of_a_prompt_are_one_observation",),
    ),
    Mutant(
        "early evaluations are not made",
        "train/config.py",
        "*(number for number in self.early if number < iterations), ",
        "",
        (f"{AGREE}test_a_run_logs_agreement_and_is_continued_to_the_bit",),
    ),
    Mutant(
        "spread is taken over all groups",
        "train/looks.py",
        "small[groups == g].std(dim=0, correction=0).mean() for g in groups.unique()",
        "small.std(dim=0, correction=0).mean() for g in groups.unique()",
        (f"{RUN}test_looks_tell_clips_apart_and_know_their_groups",),
    ),
    Mutant(
        "weights are measured from themselves",
        "train/travel.py",
        "now = self._sample()\n",
        "now = self.start\n",
        (f"{RUN}test_travel_is_the_relative_distance_and_the_share_that_moved",),
    ),
)
