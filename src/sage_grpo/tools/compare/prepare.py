"""From a suite to jobs: every arm's whole configuration is built and checked before any run starts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sage_grpo.config.metadata import COMPARED, affects
from sage_grpo.config.parsing import ConfigError, parse
from sage_grpo.run.identity import differences, plain
from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.store import FORMAT
from sage_grpo.training.config import EvalConfig, TrainConfig
from sage_grpo.worlds.world import SHAPES

SET_ELSEWHERE = {
    "seed": "the seeds are the suite's (--seeds, --first_seed)",
    "out": "rows go to the comparison's folder (--out)",
    "parallel": "each run is one process",
    "keep": "runs that are compared write no folders of their own",
}
"""Fields that an arm cannot set, with the reason; other fields about the start of a run have the last reason."""
MINIATURE = {
    "model.vae_slicing": False,
    "model.cache": None,
    "model.options": {"pad_text": 20},
    "batch.micro_batch": 128,
}
"""For the embedded model, which is small: many clips at once, whatever the lengths of their prompts, and no files of encoded prompts."""
RECORDED = ("evaluate.prompts", "evaluate.per_prompt", "evaluate.steps", "evaluate.seed")
"""Settings of the evaluation that rows have even where they are the recipe's: the benchmark's rules need them (docs/benchmark.md)."""
BUDGETS = ("passes", "clips")
"""Limits of a suite: network evaluations, and scored clips."""


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """One run."""

    arm: str
    recipe: str
    seed: int
    key: str
    """Digest of everything that decides the results."""
    config: TrainConfig
    settings: dict[str, Any]
    """Settings other than the recipe's, and the evaluation's."""
    points: tuple[int, ...]
    kind: str
    budgets: dict[str, int] = field(default_factory=dict)
    """By budget (`passes`, `clips`): a limit; the last iteration within it is evaluated too."""
    unseen: bool = False

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def file(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', self.arm)}-{self.key[:8]}.yaml"


def prepare(
    suite: Suite, recipe: Callable[..., TrainConfig], check: Callable[[TrainConfig], object] = lambda config: None
) -> list[CompareJob]:
    """All jobs, seed by seed, long runs first; `check` must accept every configuration before any run starts."""
    arms = []
    for arm in suite.arms:
        try:
            steps = {**suite.options, **arm.options}.get("rollout.steps")
            start = recipe(arm.recipe, None, suite.config)
            config = configured(suite, arm, recipe(arm.recipe, steps, suite.config))
            check(config)
        except (ValueError, FileNotFoundError) as error:
            how = f"\n{suite.notes}" if isinstance(error, FileNotFoundError) and suite.notes else ""
            raise ConfigError(f"Arm {arm.name!r}: {error}{how}") from error
        arms.append((arm, start, config))
    # Runs that learn at fresh noise levels take the longest.
    arms.sort(key=lambda one: -one[2].iterations * (1 if one[2].explores else 3))
    return [_job(suite, arm, start, replace(config, seed=seed)) for seed in suite.seeds for arm, start, config in arms]


def configured(suite: Suite, arm: Arm, start: TrainConfig) -> TrainConfig:
    """The recipe with the suite's and the arm's settings; unknown fields and values out of range are refused by name."""
    options: dict[str, Any] = dict(MINIATURE) if start.model.path in (None, SHAPES.name) else {}
    if suite.iterations is not None:
        options["iterations"] = suite.iterations
    options |= {**suite.options, **arm.options}
    if arm.iterations is not None:
        options["iterations"] = arm.iterations
    for key in options:
        reason = SET_ELSEWHERE.get(key.partition(".")[0])
        if reason is None and affects(TrainConfig, key) == "start":
            reason = SET_ELSEWHERE["keep"]
        if reason is not None:
            raise ConfigError(f"{key} cannot be compared: {reason}.")
    words = [f"--{k}={value if isinstance(value, str) else json.dumps(value)}" for k, value in options.items()]
    return parse(TrainConfig, words, prog="sage-grpo compare", defaults=start)


def _job(suite: Suite, arm: Arm, start: TrainConfig, config: TrainConfig) -> CompareJob:
    points = tuple(evaluated(suite.points, config.evaluate, config.iterations)) if suite.kind == "train" else ()
    changed = {key: new for key, (_, new) in differences(plain(asdict(start)), plain(asdict(config))).items()}
    budgets = {name: most for name in BUDGETS if (most := getattr(suite, name)) is not None}
    recorded = {name: getattr(config.evaluate, name.removeprefix("evaluate.")) for name in RECORDED}
    return CompareJob(
        arm=arm.name,
        recipe=arm.recipe,
        seed=config.seed,
        key=key_of(config, points, suite.kind, {**budgets, **({"unseen": True} if suite.unseen else {})}),
        config=config,
        settings={
            key: value for key, value in {**changed, **recorded}.items() if key not in ("seed", "out", *MINIATURE)
        },
        points=points,
        budgets=budgets,
        unseen=suite.unseen,
        kind=suite.kind,
    )


def evaluated(points: Sequence[int] | None, spec: EvalConfig, iterations: int) -> list[int]:
    """Iterations that are evaluated: the first, the last, and the requested ones between."""
    between = spec.points(iterations) if points is None else points
    return sorted({0, iterations, *(point for point in between if 0 < point < iterations)})


def key_of(config: TrainConfig, points: Sequence[int], kind: str, more: Mapping[str, int] | None = None) -> str:
    """Digest of the results of a run; `more` has its other evaluations. Defaults do not count, so that a new field changes no key."""
    changed = differences(plain(asdict(TrainConfig())), plain(asdict(config)))
    counted = {key: new for key, (_, new) in changed.items() if key != "seed" and affects(TrainConfig, key) in COMPARED}
    if "rewards" in counted:  # a list is compared whole: rows have a field that is gone, and none of the newer ones
        newer = ("judges", "schedule", "gate")
        counted["rewards"] = [
            {"standardize": {}, **{name: value for name, value in reward.items() if value or name not in newer}}
            for reward in counted["rewards"]
        ]
    text = json.dumps([counted, config.seed, list(points), kind, *([more] if more else [])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def head(job: CompareJob, status: str, fault: str | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "arm": job.arm,
        "recipe": job.recipe,
        "seed": job.seed,
        "key": job.key,
        "kind": job.kind,
        "status": status,
        "error": fault,
        "iterations": job.config.iterations,
        "settings": job.settings,
    }
