"""Errors of `sage-grpo plan`: hours, memory, and what one forecast takes from another."""

from __future__ import annotations

from mutants.mutant import Mutant

FORECAST = "train/test_forecast.py::"
PASSES = "train/test_forecast_passes.py::"
COSTS_PY, KINDS_PY, PASSES_PY = "train/forecast/costs.py", "train/forecast/kinds.py", "train/forecast/passes.py"
HOURS = (f"{FORECAST}test_gpu_hours_are_of_all_gpus_and_of_all_that_a_run_does",)
DEVICE = (f"{FORECAST}test_a_reward_on_a_device_of_its_own_takes_no_memory_here",)
TAKEN = f"{FORECAST}test_what_one_forecast_takes_from_another_is_what_it_would_find_itself"
KINDS = (f"{PASSES}test_kinds_of_parts_count_as_all_parts_do",)
KEPT = (f"{PASSES}test_states_that_are_kept_are_those_of_all_parts",)


def taken(*names: str) -> tuple[str, ...]:
    """The test of what forecasts share, for changes of these fields."""
    return tuple(f"{TAKEN}[{name}]" for name in names)


MUTANTS = (
    Mutant(
        "GPU-hours of one GPU",
        COSTS_PY,
        "return seconds * self.layout.processes / 3600",
        "return seconds / 3600",
        HOURS,
    ),
    Mutant(
        "GPU-hours without evaluations",
        COSTS_PY,
        "self.config.iterations * self.iteration_seconds + evaluations(self.config) * self.evaluation_seconds",
        "self.config.iterations * self.iteration_seconds",
        HOURS,
    ),
    Mutant(
        "GPU-hours of one evaluation",
        COSTS_PY,
        "+ evaluations(self.config) * self.evaluation_seconds",
        "+ self.evaluation_seconds",
        HOURS,
    ),
    Mutant(
        "GPU-hours of data-parallel ranks only",
        COSTS_PY,
        "return seconds * self.layout.processes / 3600",
        "return seconds * self.layout.replicate / 3600",
        HOURS,
    ),
    Mutant(
        "the device of a reward is ignored",
        COSTS_PY,
        "if spec.device in here and spec.name in REWARDS",
        "if spec.name in REWARDS",
        DEVICE,
    ),
    Mutant(
        "a reward on the run's own GPU takes nothing",
        COSTS_PY,
        '("", "cuda", "cuda:0")',
        '("",)',
        DEVICE,
    ),
    *(
        Mutant(f"plans are stale after a change: {what}", COSTS_PY, old, new, taken(*names))
        for what, old, new, names in (
            ("batch", "return config.batch, config.rollout,", "return config.rollout,", ("batch.prompts",)),
            ("rollout", "return config.batch, config.rollout,", "return config.batch,", ("rollout.steps",)),
            (
                "kernel",
                "config.kernel, config.surrogate, config.objective, update",
                "config.surrogate, config.objective, update",
                ("kernel.eta",),
            ),
            (
                "surrogate",
                "config.kernel, config.surrogate, config.objective, update",
                "config.kernel, config.objective, update",
                ("surrogate.equalize",),
            ),
            (
                "objective",
                "config.surrogate, config.objective, update",
                "config.surrogate, update",
                ("objective.levels",),
            ),
            (
                "update",
                "config.objective, update, grid, numbers",
                "config.objective, grid, numbers",
                ("update.step_fraction",),
            ),
            ("grid", "update, grid, numbers", "update, numbers", ("model.shift",)),
            ("seed", "numbers = (config.seed, config.iterations,", "numbers = (config.iterations,", ("seed",)),
            ("iterations", "numbers = (config.seed, config.iterations,", "numbers = (config.seed,", ("iterations",)),
            ("ranks", "config.iterations, layout.data,", "config.iterations,", ("parallel.sp",)),
            ("gauge", "layout.data, config.optimizer.measures_kl)", "layout.data)", ("optimizer.target_kl",)),
        )
    ),
    *(
        Mutant(f"counts are stale after a change: {what}", COSTS_PY, old, new, taken(*names))
        for what, old, new, names in (
            ("guidance in training", "            model.training_guidance,\n", "", ("model.guidance_in_training",)),
            ("guidance", "            scale,\n", "", ("model.guidance_scale",)),
            ("trust region", "            self.config.trust_region.mode,\n", "", ("trust_region.mode",)),
            ("the second expert's guidance", "            model.guidance_scale_2,\n", "", ("model.guidance_scale_2",)),
            ("clip", "            clip,\n", "", ("model.frames",)),
            ("anchor", "            self.config.anchor.every,\n", "", ("anchor.every",)),
        )
    ),
    Mutant(
        "of fresh levels all are alike",
        KINDS_PY,
        "sorted(alike(group.sigma(level)) for level in part)",
        "sorted(0 for level in part)",
        (f"{KINDS[0]}[fresh noise levels-1]",),
    ),
    Mutant(
        "groups that explore elsewhere are of one kind",
        KINDS_PY,
        "return id(group.schedule), trained,",
        "return trained,",
        (f"{KINDS[0]}[as many steps before, elsewhere-1]",),
    ),
    Mutant(
        "groups that are measured elsewhere are of one kind",
        KINDS_PY,
        "trained, None if group.gauge is None else group.gauge.step",
        "trained",
        (f"{KINDS[0]}[the step is measured-1]", f"{KINDS[0]}[the step of groups is measured-1]"),
    ),
    Mutant(
        "micro-batches of any size are of one kind",
        KINDS_PY,
        "clips = tuple(tuple((place[one.group], one.index == 0) for one in batch.members) for batch in batches)",
        "clips = len(batches)",
        (f"{KINDS[0]}[a window that moves-1]",),
    ),
    Mutant(
        "a kind counts once",
        PASSES_PY,
        "counted[id(kind.plan)] * kind.times for kind in row",
        "counted[id(kind.plan)] for kind in row",
        (f"{KINDS[0]}[every clip for itself-1]",),
    ),
    Mutant(
        "branches of one walk are parts of their own",
        KINDS_PY,
        "together.setdefault(plan.groups[index].place, [])",
        "together.setdefault(index, [])",
        (f"{KINDS[0]}[branches of one walk-1]",),
    ),
    Mutant(
        "ranks that wait repeat nothing",
        PASSES_PY,
        'row["replay"] += one.references[update] + fill',
        'row["replay"] += one.references[update]',
        (f"{KINDS[0]}[every clip for itself-3]",),
    ),
    Mutant(
        "states of a kind are kept once",
        COSTS_PY,
        "states = sum(times * size for times, size, _ in parts)",
        "states = sum(size for times, size, _ in parts)",
        KEPT,
    ),
)
