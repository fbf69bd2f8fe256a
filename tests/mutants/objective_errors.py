"""Errors in the objectives without an SDE."""

from __future__ import annotations

from mutants.mutant import Mutant

NFT = ("rl/test_nft.py",)
TRAINED = "train/test_objectives.py::"
FORMULAS = (f"{TRAINED}test_gradients_of_every_update_are_those_of_the_formulas",)
LEVELS = (f"{TRAINED}test_levels_lie_along_the_schedule_and_are_keyed",)

MUTANTS = (
    Mutant(
        "bad clips are matched like good ones",
        "rl/nft.py",
        "negative = (1.0 + beta) * v_old - beta * v - target",
        "negative = (1.0 - beta) * v_old + beta * v - target",
        NFT,
    ),
    Mutant(
        "the learning rate of nft depends on beta",
        "rl/nft.py",
        "_error(negative, sigma, weight)) / beta",
        "_error(negative, sigma, weight))",
        NFT,
    ),
    Mutant(
        "r leaves [0, 1]",
        "rl/nft.py",
        "(advantage / saturation).clamp(-1.0, 1.0)",
        "(advantage / saturation)",
        NFT,
    ),
    Mutant(
        "an adaptive weight has a gradient",
        "rl/nft.py",
        "rows.detach().abs()",
        "rows.abs()",
        NFT,
    ),
    Mutant(
        "the matching law has twice the variance",
        "flow/matching.py",
        "std=(2.0 * weight).rsqrt()",
        "std=weight.rsqrt()",
        ("flow/test_matching.py",),
    ),
    Mutant(
        "members of a group are learned with one noise",
        "train/rollout.py",
        '"fresh", self.seed, self.iteration, m.group, m.index, level)',
        '"fresh", self.seed, self.iteration, m.group, 0, level)',
        FORMULAS,
    ),
    Mutant(
        "clips are noised to a step of the rollout instead of their level",
        "train/rollout.py",
        "interpolate(x0, eps, policy.sigma(replay.step))",
        "interpolate(x0, eps, path.policy.sigma(replay.step))",
        FORMULAS,
    ),
    Mutant(
        "the target velocity points to the noise's negative",
        "train/rollout.py",
        "x_next=self.storage.kept(velocity(x0, eps))",
        "x_next=self.storage.kept(velocity(eps, x0))",
        FORMULAS,
    ),
    Mutant(
        "later updates take the live policy for the old one",
        "train/trainer.py",
        "if self.old is not None and old_passes[update]:",
        "if False:",
        FORMULAS,
    ),
    Mutant(
        "the newest policy samples where the old one should",
        "train/trainer.py",
        "with self.state.old.applied() if self.state.old is not None else nullcontext():",
        "with nullcontext():",
        (f"{TRAINED}test_the_old_policy_samples_and_the_newest_is_evaluated",),
    ),
    Mutant(
        "the old policy's decay is the newest one's",
        "train/anchor.py",
        "lerp_(p.detach().to(self.copies[name]), 1.0 - decay)",
        "lerp_(p.detach().to(self.copies[name]), decay)",
        FORMULAS,
    ),
    Mutant(
        "an old policy that does not lag is never renewed",
        "train/anchor.py",
        "        if not self.lags:\n            self.renew()\n",
        "        pass\n",
        FORMULAS,
    ),
    Mutant(
        "a checkpoint forgets the old policy",
        "train/state.py",
        '            **state_of(self.old, "old"),\n',
        "",
        (f"{TRAINED}test_a_resumed_run_is_the_same_run",),
    ),
    Mutant(
        "every iteration learns at the same levels",
        "train/planner.py",
        'f"levels/{config.seed}/{iteration}/{place}"',
        'f"levels/{config.seed}/{place}"',
        LEVELS,
    ),
    Mutant(
        "levels are drawn where another expert runs",
        "train/levels.py",
        "steps = [step for step in range(grid.num_steps) if trains(sigmas[step])]",
        "steps = list(range(grid.num_steps))",
        (f"{TRAINED}test_levels_are_the_trained_experts",),
    ),
    Mutant(
        "a micro-batch mixes prompts that have other levels",
        "train/planner.py",
        "or self._together or self.config.objective.fresh",
        "or self._together",
        (f"{TRAINED}test_micro_batches_are_a_matter_of_memory",),
    ),
    Mutant(
        "the plan forgets the old policy's passes",
        "train/forecast/passes.py",
        'return [(need == "pass") + first for need, first in zip(needs, old)]',
        'return [int(need == "pass") for need in needs]',
        ("train/test_forecast_passes.py::test_the_old_policys_passes",),
    ),
)
