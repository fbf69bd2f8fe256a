"""Checks that need no weights: versions, devices, files, and the sampler on its schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version

import torch

from sage_grpo.data.prompts import Prompt
from sage_grpo.models.checkpoints.checkpoint import check_folder, resolve
from sage_grpo.models.devices import choose_device, slow_dtype
from sage_grpo.models.spec import ModelSpec
from sage_grpo.run.preflight import check_plan, needs, preflight, prompt_remarks
from sage_grpo.samplers.kernels import Kernel
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.tools.doctor.check import Check
from sage_grpo.tools.inspect import inspect_kernel, instabilities
from sage_grpo.training.config import TrainConfig

LIBRARIES = ("torch", "diffusers", "transformers", "peft")
LITTLE_FREE = 0.5
"""Less of a GPU's memory free than this share means that another program uses it."""


def versions() -> Check:
    """The libraries against the oldest versions that are supported."""
    try:
        wanted = dict(re.findall(r"^([\w-]+)>=([\d.]+)", line)[0] for line in _plain(requires("sage-grpo") or []))
    except PackageNotFoundError:
        return Check("versions", "skip", "the package is not installed, so its requirements are unknown")
    found = {name: version(name) for name in LIBRARIES}
    old = [name for name in LIBRARIES if name in wanted and _key(found[name]) < _key(wanted[name])]
    needs = {name: f" (needs {wanted[name]})" if name in old else "" for name in found}
    return Check(
        "versions",
        "fail" if old else "pass",
        ", ".join(f"{name} {found[name]}{needs[name]}" for name in found),
        remedy="pip install -U " + " ".join(f"'{name}>={wanted[name]}'" for name in old),
    )


def _plain(lines: list[str]) -> list[str]:
    """Requirements that always hold: extras have a marker."""
    return [line for line in lines if ";" not in line and re.match(r"[\w-]+>=[\d.]+", line)]


def _key(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def device(spec: ModelSpec, place: torch.device | None = None) -> Check:
    """The device of the run, and its dtype on it."""
    chosen = choose_device(spec.device) if place is None else place
    if chosen.type != "cuda":
        value = f"{chosen.type}, {torch.get_num_threads()} threads, {spec.dtype}"
        slow = slow_dtype(spec.dtype, chosen)
        return Check("device", "warn" if slow else "pass", value, remedy="set model.dtype to float32, or take a GPU")
    free, total = torch.cuda.mem_get_info(chosen)
    value = f"{torch.cuda.get_device_name(chosen)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, {spec.dtype}"
    if spec.dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
        return Check("device", "fail", f"{value}, which it cannot compute in", free / total, remedy="use float32")
    return Check("device", "warn" if free < LITTLE_FREE * total else "pass", value, free / total)


def plan(config: TrainConfig, ranks: int = 1) -> Check:
    """Windows, steps, updates and ranks against one another, on a grid that needs no model."""
    try:
        found = check_plan(config, ranks).plan(0, [Prompt("")] * config.batch.prompts)
    except ValueError as error:
        return Check("plan", "fail", str(error))
    trained = sorted({label for update in range(found.updates) for label in found.labels(update)})
    return Check("plan", "pass", f"{config.rollout.steps} steps, {trained} trained in {found.updates} update(s)")


def files(config: TrainConfig, ranks: int = 1) -> Check:
    """All files of the configuration: present, readable and whole, before anything large is loaded."""
    try:
        preflight(config, ranks)
        named = list(needs(config))
        away = [need.value for need in named if not need.is_here]
        if config.model.family is None and config.model.path not in away:
            check_folder(resolve(config.model))
    except (ValueError, OSError) as error:
        return Check("files", "fail", str(error))
    there = f"the checkpoint{' and ' if named else ''}{', '.join(need.key for need in named)}"
    return Check("files", "pass", f"would be downloaded: {', '.join(away)}" if away else f"{there}: whole")


def prompts(training: Sequence[Prompt], held_out: Sequence[Prompt]) -> Check:
    """Training prompts against held-out ones, and each against copies of itself."""
    found = prompt_remarks(training, held_out)
    value = " ".join(found) or f"{len(training)} to train on, {len(held_out)} held out, all different"
    return Check("prompts", "warn" if found else "pass", value, float(len(found)))


def variance(kernel: Kernel, schedule: Schedule) -> Check:
    """The variance of every step that explores: a number, and not below 0."""
    # Every step of the grid: one that a window or a clamp leaves out today may explore in another run.
    found = [float(kernel(*map(float, schedule.pair(index))).std) for index in range(schedule.num_steps)]
    bad = [index for index, std in enumerate(found) if not 0 <= std < float("inf")]
    stds = [std for std, explores in zip(found, schedule.stochastic) if explores]
    if bad or not stds:
        return Check("variance", "fail", f"not a number at step(s) {bad}" if bad else "no step explores")
    return Check("variance", "pass", f"std {min(stds):.3g} to {max(stds):.3g} over {len(stds)} steps")


def last_step(kernel: Kernel, schedule: Schedule, unexplored: str | None = None) -> Check:
    """No noise of its own in the last step, which no later step removes; `unexplored` names steps before it that were left
    deterministic for the same reason."""
    row = inspect_kernel(kernel, schedule).rows[-1]
    left = row.std if row.sigma_next == 0 else 0.0
    value = f"noise with std {left:.3g} stays in the video" + (f"; {unexplored}" if unexplored else "")
    return Check("last step", "warn" if left > 0 else "pass", value, left)


def stability(kernel: Kernel, schedule: Schedule) -> Check:
    """A perfect network would end at its data with this kernel and schedule."""
    found, report = instabilities(kernel, schedule), inspect_kernel(kernel, schedule)
    value = f"final variance {report.on_manifold_variance:.3f} (1 is right), off the data {report.off_manifold_variance:.2g}"
    return Check("stability", "warn" if found else "pass", " ".join(found) or value, report.on_manifold_variance)
