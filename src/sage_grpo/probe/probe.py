"""A probe from start to end: what is loaded, which settings are sampled, and what follows from their scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import yaml

from sage_grpo.flow.kernels import unfit_eta
from sage_grpo.folder.weights import Choice
from sage_grpo.parallel.world import World
from sage_grpo.probe.estimate import Effect, advise, best_step, effect, spread
from sage_grpo.probe.prober import Clips, Finding, Prober, ProbeSpec, passes
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.scoring import load_rewards
from sage_grpo.training.sources import first_frame, prompts_from

TOLERANCE = 0.1
"""Changes of reward and drift below this part of their standard deviation over start noises do not speak against an eta."""
Counting = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows that so many passes begin under a name; inside, what it gives is called after each."""


def prepare(config: TrainConfig, spec: ProbeSpec, choice: Choice) -> Prober:
    """Load what is probed; everything that can be refused before a model is loaded is refused first."""
    prompts = prompts_from(config.data.prompts, split="train")
    if len(prompts) < spec.prompts:
        raise ValueError(f"probe.prompts is {spec.prompts}, but {config.data.prompts} has only {len(prompts)} prompts.")
    prompts = prompts[: spec.prompts]
    for eta in _etas(config, spec):
        dataclasses.replace(config.kernel, eta=eta).build()  # an eta that the kernel does not take fails here
    found = choice.find(config.model)
    reward = load_rewards(config, prompts[0], World())
    model = found.load()  # last: it takes minutes, and a mistake above is found in seconds
    Prober(config, spec, model, reward, prompts, []).steps()
    conditions = model.encode([prompt.text for prompt in prompts], [first_frame(prompt) for prompt in prompts])
    model.unload_text()  # the network needs their memory
    return Prober(config, spec, model, reward, prompts, conditions)


def _etas(config: TrainConfig, spec: ProbeSpec) -> list[float]:
    """Values of eta besides the configuration's."""
    eta, given = config.kernel.eta, spec.etas
    if given is None:
        given = [eta / 2, *([] if unfit_eta(config.kernel.name, 1.5 * eta) else [1.5 * eta])]
    return [value for value in sorted(given) if value != eta]


def probe(prober: Prober, say: Callable[[str], None], counting: Counting) -> Finding:
    """Sample every setting, estimate and advise. `say` gets the forecast; `counting` shows how many passes of a stretch are done."""
    eta, others = prober.config.kernel.eta, _etas(prober.config, prober.spec)
    steps = prober.steps()
    still, every = prober.still(), prober.exploring(eta, None)
    branches = {step: prober.exploring(eta, step) for step in steps}
    first = passes(still) + passes(every) + sum(map(passes, branches.values()))
    later = [len(others) * passes(plans) for plans in branches.values()]
    say(_forecast(prober, len(steps), first, later))
    with counting("steps", first) as advance:
        prober = dataclasses.replace(prober, progress=advance)
        base = prober.run(still, eta)
        whole = _effect(prober.run(every, eta), base)
        rows = [(step, _effect(prober.run(plans, eta), base)) for step, plans in branches.items()]
    best = best_step(rows)
    second = len(others) * passes(branches[best])
    with counting(f"eta at step {best}", second) as advance:
        prober = dataclasses.replace(prober, progress=advance)
        etas = [(value, _effect(prober.run(prober.exploring(value, best), value), base)) for value in others]
    etas = sorted([*etas, (eta, dict(rows)[best])], key=lambda row: row[0])
    drift = 0.0 if base.drift is None else TOLERANCE * spread(base.drift[..., 0])
    advice = advise(rows, etas, loss=TOLERANCE * spread(base.reward[..., 0]), drift=drift)
    return Finding(eta, rows, whole, best, etas, base, advice, first + second)


def _forecast(prober: Prober, steps: int, first: int, later: Sequence[int]) -> str:
    spec, least, most = prober.spec, min(later), max(later)
    span = f"{most}" if least == most else f"{least} to {most}"
    return (
        f"{spec.prompts} prompts x {spec.starts} start noises x {spec.members} clips, for each of {steps} steps and for all at once, in "
        f"micro-batches of {prober.config.batch.micro_batch}: {first} passes of the network, then {span} to compare eta at the best step."
    )


def _effect(clips: Clips, still: Clips) -> Effect:
    drift = None if still.drift is None else still.drift[..., 0]
    return effect(clips.reward, still.reward[..., 0], clips.drift, drift)


def snippet(finding: Finding, config: TrainConfig) -> str | None:
    """The recommendation as YAML for `sage-grpo train --config`; None where no step can be recommended."""
    advice = finding.advice
    if not advice.steps:
        return None
    window = {"kind": "drawn", "length": 1, "at": advice.steps, "weights": advice.weights, "branches": 1}
    document = {
        "kernel": {"name": config.kernel.name, "eta": advice.eta},
        "rollout": {"steps": config.rollout.steps, "same_noise": True, "share": True, "window": window},
        "update": {"updates_per_rollout": 1, "step_fraction": 1.0},
        "objective": {"kind": "surrogate", "weight": "uniform"},  # others do not explore
    }
    return "# What `sage-grpo probe` recommends.\n" + yaml.safe_dump(document, sort_keys=False)


def document(prober: Prober, finding: Finding) -> dict[str, Any]:
    """What probe.json holds."""
    spec, grid, kernel = prober.spec, prober.grid, prober.config.kernel.build(prober.grid)
    steps = [
        {
            "step": step,
            "sigma": float(grid.sigmas[step]),
            "sigma_next": float(grid.sigmas[step + 1]),
            "sensitivity": float(kernel(*grid.pair(step)).sensitivity),
            **dataclasses.asdict(row),
        }
        for step, row in finding.steps
    ]
    still = finding.still
    return {
        "kernel": {"name": prober.config.kernel.name, "eta": finding.eta},
        "sampled": {"prompts": spec.prompts, "starts": spec.starts, "members": spec.members, "passes": finding.passes},
        "deterministic": {
            "reward": float(still.reward.nanmean()),
            "start_std": spread(still.reward[..., 0]),
            "drift": None if still.drift is None else float(still.drift.nanmean()),
        },
        "steps": steps,
        "all_steps": dataclasses.asdict(finding.every),
        "eta_step": finding.best,
        "etas": [{"eta": eta, **dataclasses.asdict(row)} for eta, row in finding.etas],
        "recommended": dataclasses.asdict(finding.advice),
    }
