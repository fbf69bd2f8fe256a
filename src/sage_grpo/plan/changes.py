"""Suggests changes to a run that does not fit or takes too long; each is applied and forecast again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from sage_grpo.config.metadata import affects
from sage_grpo.distributed.spec import ParallelError
from sage_grpo.models.spec import LoraSpec
from sage_grpo.plan.architecture import Architecture, find_architecture
from sage_grpo.plan.costs import Forecast, forecast
from sage_grpo.training.config import TrainConfig

Same = Literal["same", "nearly", "more GPUs", "another"]
"""Effect on the run: only memory and time; a gray level in decoded clips; more hardware; or another run. In the order
of preference."""
PREFERENCE: tuple[Same, ...] = get_args(Same)
DECODED = ("model.vae_tiling", "model.vae_dtype")
"""Fields that move decoded clips by a grey level or two."""
LEAST = 0.01
"""A change is listed if it alters peak or time by at least this share."""


@dataclass(frozen=True)
class Change:
    """One change, with the forecast after it."""

    option: str
    """Option as typed."""
    run: Same
    """Effect on the run."""
    after: Forecast


def changes(now: Forecast) -> list[Change]:
    """Useful changes, best first: those that make a run fit, at the least cost in time, then those that save most."""
    if now.network is None:
        return []
    found = [change for change in _tried(now) if _buys(now, change.after)]
    if now.fits:
        found = [one for one in found if one.after.fits and one.after.iteration_seconds < now.iteration_seconds]
        return sorted(found, key=lambda one: (PREFERENCE.index(one.run), one.after.gpu_hours))
    smaller = [one for one in found if one.after.peak < now.peak]
    return sorted(smaller, key=_rank)


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
    for edit in _edits(now.config, now):
        changed = now.config
        for key, value in edit.items():
            changed = _edited(changed, key, value)
        if changed == now.config:
            continue
        try:
            architecture = _architecture(now, changed)
            after = forecast(
                changed, now.hardware, gpus=gpus, architecture=architecture, held_out=now.held_out or None, like=now
            )
        except (ParallelError, ValueError):  # a layout or a window that is invalid for this run
            continue
        yield Change(" ".join(_typed(key, value) for key, value in edit.items()), _stays(edit), after)
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
    """The architecture after a change, which may affect the clip or the guidance."""
    return now.architecture if changed.model == now.config.model else find_architecture(changed.model)


def _edits(config: TrainConfig, now: Forecast) -> Iterator[dict[str, Any]]:
    """Edits of fields, change by change: those that keep the run the same come first."""
    video, heads = now.architecture.video, now.network.heads if now.network else 1
    assert video is not None
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
        if heads % (2 * config.parallel.sp) == 0:
            yield {"parallel.sp": 2 * config.parallel.sp}
    if config.model.lora is None:
        yield {"model.lora": LoraSpec(rank=32)}
    if config.trust_region.uses_anchor and not config.build_objective().in_pairs:  # the loss of dpo compares with it
        yield {"trust_region.mode": "none"}
    if not config.explores:
        yield {"objective.levels": max(config.update.updates_per_rollout, config.objective.levels // 2)}
        if any(phase.name == "gradient" for phase in now.phases) and (config.objective.frames or video.frames) > 16:
            yield {"objective.frames": (config.objective.frames or video.frames) // 4}
    elif config.update.step_fraction > 0.5 and now.plan.labels(0)[1:]:
        yield {"update.step_fraction": config.update.step_fraction / 2}
    if now.job.guidance:
        yield {"model.guidance_in_training": False}
    patch = now.network.patch if now.network else (1, 1, 1)
    yield {"model.frames": (video.frames - 1) // (2 * patch[0]) * patch[0] + 1}
    height, width = (
        max(one, round(0.75 * size / one) * one) for size, one in zip((video.height, video.width), patch[1:])
    )
    yield {"model.height": height, "model.width": width}


def _edited(part: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return replace(part, **{name: _edited(getattr(part, name), rest, value) if rest else value})


def _typed(key: str, value: Any) -> str:
    """A change as typed."""
    if isinstance(value, LoraSpec):
        return f"--{key}.rank {value.rank}"
    word = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
    return f"--{key} {word}"


def _stays(edit: Iterable[str]) -> Same:
    """The effect of changing these fields on the run."""
    if all(affects(TrainConfig, key) in ("speed", "machine") for key in edit):
        return "same"
    return "nearly" if all(key in DECODED for key in edit) else "another"
