"""What to change when a run does not fit, or takes too long, and what every change buys: each is made, and forecast again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from sage_grpo.forecast.architecture import Architecture, find_architecture
from sage_grpo.forecast.costs import Forecast, forecast
from sage_grpo.models.spec import LoraSpec
from sage_grpo.parallel.spec import ParallelError
from sage_grpo.training.config import TrainConfig

Edit = Callable[[TrainConfig], TrainConfig]
Same = Literal["same", "nearly", "more GPUs", "another"]
"""A matter of memory and time only, or of a grey level in decoded clips; or more hardware; or another run. In the order of preference."""
PREFERENCE: tuple[Same, ...] = get_args(Same)
LEAST = 0.01
"""A change that moves neither peak nor time by this much is not worth a line."""


@dataclass(frozen=True)
class Change:
    """One change, with the forecast after it."""

    option: str
    """As it is typed."""
    run: Same
    """Whether the run stays the same."""
    after: Forecast


def changes(now: Forecast) -> list[Change]:
    """Changes that buy something, best first: what makes a run fit, at the least cost in time, then what saves most."""
    if now.network is None:
        return []
    found = [change for change in _tried(now) if _buys(now, change.after)]
    if now.fits:
        found = [one for one in found if one.after.fits and one.after.iteration_seconds < now.iteration_seconds]
        return sorted(found, key=lambda one: (PREFERENCE.index(one.run), one.after.gpu_hours))
    smaller = [one for one in found if one.after.peak < now.peak]
    return sorted(smaller, key=_rank)


def way_to_fit(now: Forecast, most: int = 4) -> list[Change]:
    """Changes, one on top of the other, until the run fits; empty where it does already, or where nothing helps."""
    made: list[Change] = []
    while not now.fits and len(made) < most:
        options = changes(now)
        if not options:
            return made
        made.append(options[0])
        now = options[0].after
    return made


def _rank(change: Change) -> tuple[float, ...]:
    after = change.after
    if after.fits:
        return (0, PREFERENCE.index(change.run), after.gpu_hours)
    return (1, PREFERENCE.index(change.run), after.peak)


def _buys(now: Forecast, after: Forecast) -> bool:
    memory = abs(after.peak - now.peak) > LEAST * now.peak
    return memory or abs(after.iteration_seconds - now.iteration_seconds) > LEAST * now.iteration_seconds


def _tried(now: Forecast) -> Iterator[Change]:
    gpus = now.layout.processes
    for option, run, edit in _edits(now.config, now):
        changed = edit(now.config)
        if changed == now.config:
            continue
        try:
            architecture = _architecture(now, changed)
            after = forecast(
                changed, now.hardware, gpus=gpus, architecture=architecture, held_out=now.held_out or None, like=now
            )
        except (ParallelError, ValueError):  # a layout or a window that this run cannot have
            continue
        yield Change(option, run, after)
    if now.hardware.is_cpu:
        return
    try:
        wider = forecast(
            now.config, now.hardware, gpus=2 * gpus, architecture=now.architecture, held_out=now.held_out or None
        )
    except ValueError:  # more ranks than clips, or a fixed layout
        return
    yield Change(f"--gpus {2 * gpus}", "more GPUs", wider)


def _architecture(now: Forecast, changed: TrainConfig) -> Architecture:
    """A change may be of the clip, or of the guidance."""
    return now.architecture if changed.model == now.config.model else find_architecture(changed.model)


def _edits(config: TrainConfig, now: Forecast) -> Iterator[tuple[str, Same, Edit]]:
    """Option, whether the run stays the same, and how to make the change."""
    yield from _same(config, now)
    video, heads = now.architecture.video, now.network.heads if now.network else 1
    assert video is not None
    if now.layout.processes > 1:
        sp = 2 * config.parallel.sp
        if heads % sp == 0:
            yield f"--parallel.sp {sp}", "same", lambda c: replace(c, parallel=replace(c.parallel, sp=sp))
    if config.model.lora is None:
        yield "--model.lora.rank 32", "another", lambda c: replace(c, model=replace(c.model, lora=LoraSpec(rank=32)))
    if config.trust_region.uses_anchor:
        none = replace(config.trust_region, mode="none")
        yield "--trust_region.mode none", "another", lambda c: replace(c, trust_region=none)
    if config.objective.fresh:
        fewer = replace(config.objective, levels=max(config.update.updates_per_rollout, config.objective.levels // 2))
        if fewer != config.objective:
            yield f"--objective.levels {fewer.levels}", "another", lambda c: replace(c, objective=fewer)
    elif config.update.step_fraction > 0.5 and now.plan.labels(0)[1:]:
        half = replace(config.update, step_fraction=config.update.step_fraction / 2)
        yield f"--update.step_fraction {half.step_fraction:g}", "another", lambda c: replace(c, update=half)
    if now.job.guidance:
        yield (
            "--model.guidance_in_training false",
            "another",
            lambda c: replace(c, model=replace(c.model, guidance_in_training=False)),
        )
    frames = (video.frames - 1) // 8 * 4 + 1
    yield f"--model.frames {frames}", "another", lambda c: replace(c, model=replace(c.model, frames=frames))
    patch = now.network.patch if now.network else (1, 1, 1)
    height, width = (
        max(one, round(0.75 * size / one) * one) for size, one in zip((video.height, video.width), patch[1:])
    )
    smaller = replace(config.model, height=height, width=width)
    yield f"--model.height {height} --model.width {width}", "another", lambda c: replace(c, model=smaller)


def _changed(part: str, value: Any) -> Edit:
    return lambda config: replace(config, **{part: value})


def _same(config: TrainConfig, now: Forecast) -> Iterator[tuple[str, Same, Edit]]:
    """Changes that leave what is computed as it is."""
    asked: tuple[bool | Literal["attention"], ...] = (True, "attention", False)
    for keep in asked:
        update = replace(config.update, gradient_checkpointing=keep)
        option = f"--update.gradient_checkpointing {str(keep).lower()}"
        yield option, "same", _changed("update", update)
    if config.batch.micro_batch > 1:
        micro = config.batch.micro_batch // 2
        yield f"--batch.micro_batch {micro}", "same", lambda c: replace(c, batch=replace(c.batch, micro_batch=micro))
    yield "--rollout.offload true", "same", lambda c: replace(c, rollout=replace(c.rollout, offload=True))
    if config.trust_region.uses_anchor:
        yield "--anchor.offload true", "same", lambda c: replace(c, anchor=replace(c.anchor, offload=True))
    yield "--model.vae_tiling true", "nearly", lambda c: replace(c, model=replace(c.model, vae_tiling=True))
    if now.job.vae_bytes > 2 and not now.hardware.is_cpu:
        yield "--model.vae_dtype bfloat16", "nearly", lambda c: replace(c, model=replace(c.model, vae_dtype="bfloat16"))
    if not now.hardware.is_cpu and not now.job.compiled:
        yield "--model.compile true", "same", lambda c: replace(c, model=replace(c.model, compile=True))
    if now.layout.processes > 1:
        for name in ("cpu_offload", "sync_every_pass"):
            parallel = replace(config.parallel, **{name: True})
            yield f"--parallel.{name} true", "same", _changed("parallel", parallel)
