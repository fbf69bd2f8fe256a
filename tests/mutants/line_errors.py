"""Errors along the straight line that others planted and no test saw: plan, rollout, update, pace, advantage, state, evaluation."""

from __future__ import annotations

from mutants.mutant import Mutant

PLAN = "train/test_plan_laws.py::"
REPLAYS = (f"{PLAN}test_every_member_replays_what_its_own_group_trains",)
WAYS = (f"{PLAN}test_passes_are_shared_only_where_the_whole_way_is_the_same",)
WINDOWS = (f"{PLAN}test_a_drawn_window_may_lie_anywhere_up_to_the_end",)
NOISE = (f"{PLAN}test_exploration_noise_goes_by_the_step_of_the_runs_own_grid",)
STATE = "train/test_state_laws.py::"
NAMES = (f"{STATE}test_clips_of_an_evaluation_have_one_name_if_and_only_if_they_have_one_noise",)
BACK = (f"{STATE}test_an_anchor_is_live_after_going_back_only_if_it_was_then",)
MEANS = (f"{STATE}test_metrics_of_updates_are_means_but_for_the_largest_ratio",)
PACE = "rl/test_pace.py::"
EPS = ("rl/test_advantage.py::test_eps_is_added_to_the_std_and_not_to_the_variance",)

PLANS = (
    Mutant(
        "groups side by side replay the steps of the first of them",
        "train/plan.py",
        "self.offset, self.trained, self.shared\n",
        "self.offset, self.shared\n",
        REPLAYS,
    ),
    Mutant(
        "an update replays the steps of the first group alone",
        "train/plan.py",
        "step for group in groups for step in group.trained[update])\n        result",
        "step for group in groups[:1] for step in group.trained[update])\n        result",
        REPLAYS,
    ),
    Mutant(
        "shared steps are replayed in every update that trains any",
        "train/plan.py",
        "if step in together[0].trained[update] and step < together[0].branch:",
        "if step < together[0].branch:",
        REPLAYS,
    ),
    Mutant(
        "members replay steps that their group trains in another update",
        "train/plan.py",
        "here = [group for group in groups if step in group.trained[update]]",
        "here = groups",
        REPLAYS,
    ),
    Mutant(
        "a shared step is replayed again by every member",
        "train/plan.py",
        "for group in here if step >= group.branch}",
        "for group in here}",
        REPLAYS,
    ),
    Mutant(
        "the key of a shared pass lacks the sigma at which it is made",
        "train/rollout.py",
        "key, known = self.keys[self.index], self.sampler._known",
        "key = tuple((place, sigmas[:-1]) for place, sigmas in self.keys[self.index])\n        known = self.sampler._known",
        WAYS,
    ),
    Mutant(
        "the key of a shared pass holds only the number of its step",
        "train/plan.py",
        "return [(group.place, tuple(sigmas[: step + 1])) for step in range(group.branch)]",
        "return [(group.place, (float(step), sigmas[0])) for step in range(group.branch)]",
        WAYS,
    ),
    Mutant(
        "the key of a shared pass holds only its sigma",
        "train/plan.py",
        "tuple(sigmas[: step + 1])) for step",
        "tuple(sigmas[step : step + 1])) for step",
        WAYS,
    ),
    Mutant(
        "prompts share passes",
        "train/plan.py",
        "return [(group.place, tuple(sigmas[: step + 1]))",
        "return [(0, tuple(sigmas[: step + 1]))",
        WAYS,
    ),
    Mutant(
        "the last window is never drawn",
        "train/planner.py",
        "for first in range(steps - window.size + 1) if self.trainable",
        "for first in range(steps - window.size) if self.trainable",
        WINDOWS,
    ),
    Mutant(
        "the first window is never drawn",
        "train/planner.py",
        "for first in range(steps - window.size + 1) if self.trainable",
        "for first in range(1, steps - window.size + 1) if self.trainable",
        WINDOWS,
    ),
    Mutant(
        "exploration noise goes by the step's own index instead of the run's",
        "train/rollout.py",
        "self.keys.step(replay.members, walk.group.label(replay.step),",
        "self.keys.step(replay.members, replay.step,",
        NOISE,
    ),
    Mutant(
        "steps before a window move its noise",
        "train/planner.py",
        "offset = first - schedule.exploring_range()[0]",
        "offset = schedule.exploring_range()[0] - first",
        NOISE,
    ),
)

GAUGES = (f"{PLAN}test_gauges_of_an_iteration_cover_the_steps_in_proportion",)
RANKS = (f"{PLAN}test_ranks_make_as_many_passes_as_the_one_that_has_most",)
LAYOUTS = (
    Mutant(
        "windows that train one step are sampled as one",
        "train/plan.py",
        "schedule.stochastic, self.offset, self.trained",
        "self.offset, self.trained",
        (f"{PLAN}test_what_goes_together_goes_the_same_way",),
    ),
    Mutant(
        "ranks wait for passes that one of them never makes",
        "train/plan.py",
        "[max(len(self.replays(rank, update)) for rank in ranks)",
        "[min(len(self.replays(rank, update)) for rank in ranks)",
        RANKS,
    ),
    Mutant(
        "ranks make as many idle passes as the first has passes",
        "train/plan.py",
        "max(count[kind] for count in counts)",
        "counts[0][kind]",
        RANKS,
    ),
    Mutant(
        "the equaliser knows the steps of this iteration alone",
        "train/planner.py",
        "weighted = [step for first in allowed for step in",
        "weighted = [step for _, first in firsts for step in",
        (f"{PLAN}test_the_equaliser_is_of_all_steps_that_may_be_drawn",),
    ),
    Mutant(
        "all groups of an iteration are gauged at one step",
        "train/planner.py",
        "(draw + index) % groups / groups * edges[-1]",
        "draw * edges[-1]",
        GAUGES,
    ),
)

UPDATES = (
    Mutant(
        "the largest log-ratio is that of the first rank",
        "train/update.py",
        "float(world.gather(read[-1:]).max())",
        "float(world.gather(read[-1:])[0])",
        (f"{STATE}test_the_largest_ratio_is_that_of_all_ranks",),
    ),
    Mutant(
        "the largest log-ratio is added up over ranks",
        "train/update.py",
        "float(world.gather(read[-1:]).max())",
        "float(world.sum(read[-1:]))",
        (f"{STATE}test_the_largest_ratio_is_that_of_all_ranks",),
    ),
    Mutant(
        "the largest log-ratio of an update is that of its last item",
        "train/update.py",
        "torch.maximum(tally.largest_log_ratio, live.max().double())",
        "live.max().double()",
        (f"{STATE}test_the_largest_ratio_of_an_update_is_that_of_all_its_items",),
    ),
    Mutant(
        "the largest log-ratio is averaged over updates",
        "train/update.py",
        '        mean["ratio/largest_log"] = max(log["ratio/largest_log"] for log in logs)\n',
        "",
        MEANS,
    ),
    Mutant(
        "the largest log-ratio is that of the last update",
        "train/update.py",
        'max(log["ratio/largest_log"] for log in logs)',
        'logs[-1]["ratio/largest_log"]',
        MEANS,
    ),
    Mutant(
        "replay is judged by the last update",
        "train/update.py",
        'mean["ratio/first_update"] = logs[0]["ratio/largest_log"]',
        'mean["ratio/first_update"] = logs[-1]["ratio/largest_log"]',
        MEANS,
    ),
    Mutant(
        "updates without a figure count in its mean",
        "train/update.py",
        "/ sum(name in log for log in logs)",
        "/ len(logs)",
        MEANS,
    ),
    Mutant(
        "the ramp of the old policy begins one iteration late",
        "train/trainer.py",
        "self.config.objective.decay(plan.iteration + 1)",
        "self.config.objective.decay(plan.iteration)",
        (f"{STATE}test_the_ramp_begins_with_the_first_iteration",),
    ),
    Mutant(
        "the ramp of the old policy ends one iteration late",
        "rl/objective.py",
        "min(1.0, iteration / self.old_ramp)",
        "min(1.0, (iteration - 1) / self.old_ramp)",
        (f"{STATE}test_the_share_of_the_old_policy_grows_to_its_end_over_the_ramp",),
    ),
    Mutant(
        "the ramp of the old policy goes on for ever",
        "rl/objective.py",
        "min(1.0, iteration / self.old_ramp)",
        "iteration / self.old_ramp",
        (f"{STATE}test_the_share_of_the_old_policy_grows_to_its_end_over_the_ramp",),
    ),
)

STEPS = (
    Mutant(
        "the learning rate climbs back after a brake",
        "rl/pace.py",
        ", self.most * self.brake)",
        ", self.most)",
        (f"{PACE}test_a_brake_holds_however_little_the_policy_moves",),
    ),
    Mutant(
        "a braked learning rate cannot fall as far",
        "rl/pace.py",
        "LEAST * self.brake)",
        "LEAST)",
        (f"{PACE}test_a_brake_holds_however_little_the_policy_moves",),
    ),
    Mutant(
        "brakes compound",
        "rl/pace.py",
        "self.factor *= brake / self.brake",
        "self.factor *= brake",
        (f"{PACE}test_brakes_are_shares_of_the_free_step_and_not_of_one_another",),
    ),
    Mutant(
        "a continued run forgets its brake",
        "rl/pace.py",
        'float(state.get("brake", 1.0))',
        "1.0",
        (f"{PACE}test_brakes_are_shares_of_the_free_step_and_not_of_one_another",),
    ),
    Mutant(
        "eps is added to the variance of a group",
        "rl/advantage.py",
        "centred / (variance.sqrt()[index] + eps)",
        "centred / (variance + eps).sqrt()[index]",
        EPS,
    ),
    Mutant(
        "eps is added to the variance of all groups",
        "rl/advantage.py",
        "centred / ((centred.square().sum() / ok.sum()).sqrt() + eps)",
        "centred / (centred.square().sum() / ok.sum() + eps).sqrt()",
        EPS,
    ),
    Mutant(
        "eps is added to the variance of decoupled rewards",
        "rl/advantage.py",
        "total / ((total.square().sum() / ok.sum()).sqrt() + eps)",
        "total / (total.square().sum() / ok.sum() + eps).sqrt()",
        EPS,
    ),
    Mutant(
        "decoupled rewards have an eps of their own",
        "rl/advantage.py",
        "valid=ok, scale=scale, eps=eps) for name",
        "valid=ok, scale=scale) for name",
        EPS,
    ),
)

STATES = (
    Mutant(
        "the anchor is taken for live after going back",
        "train/state.py",
        "self.anchor.renewed_at = self.updates if was_live else -1",
        "self.anchor.renewed_at = self.updates",
        BACK,
    ),
    Mutant(
        "the anchor is never live after going back",
        "train/state.py",
        "self.anchor.renewed_at = self.updates if was_live else -1",
        "self.anchor.renewed_at = -1",
        BACK,
    ),
    Mutant(
        "going back leaves the anchor's age as it is",
        "train/state.py",
        "            self.anchor.renewed_at = self.updates if was_live else -1\n",
        "            del was_live\n",
        BACK,
    ),
    Mutant(
        "clips of a prompt share one name",
        "train/evaluate.py",
        '"noise": f"{seed}/{group}/{index}" if own is None',
        '"noise": f"{seed}/{group}" if own is None',
        NAMES,
    ),
    Mutant(
        "clips of a prompt with a seed of its own share one name",
        "train/evaluate.py",
        'else f"{own + index}"',
        'else f"{own}"',
        NAMES,
    ),
    Mutant(
        "evaluations of another seed name their clips alike",
        "train/evaluate.py",
        '"noise": f"{seed}/{group}/{index}" if own is None',
        '"noise": f"{group}/{index}" if own is None',
        NAMES,
    ),
    Mutant(
        "the standard error counts clips that failed",
        "train/evaluate.py",
        "max(1.0, float(valid.sum())) ** 0.5",
        "max(1.0, float(len(valid))) ** 0.5",
        (f"{STATE}test_the_standard_error_is_of_the_clips_that_have_a_score",),
    ),
)

MUTANTS = (*PLANS, *LAYOUTS, *UPDATES, *STEPS, *STATES)
