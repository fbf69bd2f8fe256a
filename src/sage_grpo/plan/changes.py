"""Other settings of a run, each forecast again: changes where it does not fit or takes too long, and budgets of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from sage_grpo.config.metadata import affects
from sage_grpo.models.spec import LoraSpec
from sage_grpo.plan.architecture import find_architecture
from sage_grpo.plan.costs import Forecast, forecast
from sage_grpo.plan.formulas import GIB
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.offload import kept

Same = Literal["same", "nearly", "more GPUs", "another"]
"""Effect on the run: only memory and time; a gray level in decoded clips; more hardware; or another run. In the order
of preference."""
PREFERENCE: tuple[Same, ...] = get_args(Same)
DECODED = ("model.vae_tiling", "model.vae_dtype")  # fields that move decoded clips by a gray level or two
LEAST = 0.01  # A change is listed if it alters peak or time by at least this share
SIZES = (16.0, 24.0, 40.0, 80.0, 140.0)  # budgets in GiB, from a small card to an H200


@dataclass(frozen=True)
class Change:
    """One change, with the forecast after it."""

    option: str  # option as typed
    run: Same  # effect on the run
    after: Forecast


def changes(now: Forecast) -> list[Change]:
    """Useful changes, best first: those that make a run fit, at the least cost in time, then those that save most."""
    useful = [change for change in _tried(now) if _matters(now, change.after)]
    if now.fits:
        useful = [one for one in useful if one.after.fits and one.after.iteration_seconds < now.iteration_seconds]
        return sorted(useful, key=lambda one: (PREFERENCE.index(one.run), one.after.gpu_hours))
    return sorted((one for one in useful if one.after.peak < now.peak), key=_rank)


def way_to_fit(now: Forecast, most: int = 4) -> list[Change]:
    """Cumulative changes until the run fits; empty if it does already, or if none helps."""
    made: list[Change] = []
    while not now.fits and len(made) < most:
        options = changes(now)
        if not options:
            return made
        made.append(options[0])
        now = options[0].after
    return made


def over_memory(now: Forecast) -> list[Forecast]:
    """Forecasts with every size below the device's memory as `model.memory`, and with the whole device; empty on a
    CPU."""
    if now.hardware.is_cpu:
        return []
    budgets = [*(size for size in SIZES if size < now.hardware.gib), None]
    models = [replace(now.config.model, memory=budget) for budget in budgets]
    return [replace(now, config=replace(now.config, model=model), known=now.architecture) for model in models]


def outcome(one: Forecast) -> str:
    """Text on a budget: the activations that blocks keep, or the reason why it is too small."""
    if one.fits:
        return kept(one.activations)
    worst = max(one.phases, key=lambda phase: phase.memory.total)
    return f"too little: {worst.name} needs {worst.memory.total / GIB:.1f}, {one.room / GIB:.1f} can be used"


def _rank(change: Change) -> tuple[float, ...]:
    after = change.after
    return (not after.fits, PREFERENCE.index(change.run), after.gpu_hours if after.fits else after.peak)


def _matters(now: Forecast, after: Forecast) -> bool:
    memory = abs(after.peak - now.peak) > LEAST * now.peak
    return memory or abs(after.iteration_seconds - now.iteration_seconds) > LEAST * now.iteration_seconds


def _tried(now: Forecast) -> Iterator[Change]:
    """Changes, but for those whose layout or window is invalid for this run."""
    gpus = now.layout.processes
    tried: list[tuple[str, Same, TrainConfig, int]] = []
    for edit in _edits(now.config, now):
        changed = now.config
        for key, value in edit.items():
            changed = _edited(changed, key, value)
        if changed != now.config:
            tried.append((" ".join(_typed(*one) for one in edit.items()), _stays(edit), changed, gpus))
    if not now.hardware.is_cpu:
        tried.append((f"--gpus {2 * gpus}", "more GPUs", now.config, 2 * gpus))
    for option, run, config, number in tried:
        with suppress(ValueError):  # a change may affect the clip or the guidance
            built = now.architecture if config.model == now.config.model else find_architecture(config.model)
            after = forecast(config, now.hardware, gpus=number, architecture=built, held_out=now.held_out)
            yield Change(option, run, after)


def _edits(config: TrainConfig, now: Forecast) -> Iterator[dict[str, Any]]:
    """Edits of fields, change by change: those that keep the run the same come first."""
    video, patch = now.architecture.model.video, now.network.patch
    for keep in (True, "attention", False):
        yield {"update.gradient_checkpointing": keep}
    if config.batch.micro_batch > 1:
        yield {"batch.micro_batch": config.batch.micro_batch // 2}
    yield {"rollout.offload": True}
    if config.trust_region.uses_anchor:
        yield {"anchor.offload": True}
    yield {"model.vae_tiling": True}
    if now.job.vae_bytes > 2 and not now.hardware.is_cpu:
        yield {"model.vae_dtype": "bfloat16"}
    if not (now.hardware.is_cpu or now.job.compiled or config.model.deterministic):
        yield {"model.compile": True}
    if now.layout.processes > 1:
        yield {"parallel.cpu_offload": True}
        yield {"parallel.sync_every_pass": True}
        if now.network.heads % (2 * config.parallel.sp) == 0:
            yield {"parallel.sp": 2 * config.parallel.sp}
    if config.model.lora is None:
        yield {"model.lora": LoraSpec(rank=32)}
    if config.trust_region.uses_anchor and not config.build_objective().in_pairs:  # the loss of dpo compares with it
        yield {"trust_region.mode": "none"}
    if not config.explores:
        yield {"objective.levels": max(config.update.updates_per_rollout, config.objective.levels // 2)}
    elif config.update.step_fraction > 0.5 and now.plan.labels(0)[1:]:
        yield {"update.step_fraction": config.update.step_fraction / 2}
    if now.job.guidance:
        yield {"model.guidance_in_training": False}
    yield {"model.frames": (video.frames - 1) // (2 * patch[0]) * patch[0] + 1}
    height, width = (
        max(one, round(0.75 * size / one) * one) for size, one in zip((video.height, video.width), patch[1:])
    )
    yield {"model.height": height, "model.width": width}


def _edited(part: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return replace(part, **{name: _edited(getattr(part, name), rest, value) if rest else value})


def _typed(key: str, value: Any) -> str:
    if isinstance(value, LoraSpec):
        return f"--{key}.rank {value.rank}"
    word = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
    return f"--{key} {word}"


def _stays(edit: Iterable[str]) -> Same:
    if all(affects(TrainConfig, key) in ("speed", "machine") for key in edit):
        return "same"
    return "nearly" if all(key in DECODED for key in edit) else "another"
