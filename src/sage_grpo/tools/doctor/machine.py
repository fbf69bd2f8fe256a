"""Checks that need no weights: versions, devices, files, and the sampler on its schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version

import torch

from sage_grpo.data.prompts import Prompt
from sage_grpo.models.checkpoints.checkpoint import check_folder, resolve
from sage_grpo.models.devices import choose_device
from sage_grpo.models.spec import ModelSpec
from sage_grpo.plan.description import RunDescription
from sage_grpo.run.preflight import check_plan, needs, preflight
from sage_grpo.samplers.kernels import Kernel
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.tools.doctor.check import Check
from sage_grpo.tools.inspect import inspect_kernel, instabilities
from sage_grpo.training.config import TrainConfig

LIBRARIES = ("torch", "diffusers", "transformers", "peft")
LITTLE_FREE = 0.5  # less of a GPU's memory free than this share means that another program uses it


def versions() -> Check:
    try:
        lines = [line for line in requires("sage-grpo") or [] if ";" not in line]  # extras have a marker
        wanted = dict(pair for line in lines for pair in re.findall(r"^([\w-]+)>=([\d.]+)", line))
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


def _key(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def device(spec: ModelSpec, place: torch.device | None = None) -> Check:
    chosen = choose_device(spec.device) if place is None else place
    if chosen.type != "cuda":
        return Check("device", "pass", f"{chosen.type}, {torch.get_num_threads()} threads, {spec.dtype}")
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


def files(config: TrainConfig, ranks: int = 1) -> tuple[Check, list[str]]:
    """All files of the configuration: present, readable and whole, before anything large is loaded; and the remarks of preflight."""
    try:
        remarks = preflight(config, ranks)
        named = list(needs(config))
        away = [need.value for need in named if not need.is_here]
        if config.model.family is None and config.model.path not in away:
            check_folder(resolve(config.model))
    except (ValueError, OSError) as error:
        return Check("files", "fail", str(error)), []
    there = f"the checkpoint{' and ' if named else ''}{', '.join(need.key for need in named)}"
    return Check("files", "pass", f"would be downloaded: {', '.join(away)}" if away else f"{there}: whole"), remarks


def settings(run: RunDescription, remarks: Sequence[str]) -> Check:
    """The remarks of preflight (prompts that are trained on and held out, copies, a slow dtype, idle workers), and a distilled checkpoint's
    guidance and steps against those of its authors."""
    remarks = [*remarks, *filter(None, [run.advice(), run.size_advice()])]
    value = "no prompt is a copy or held out and trained on"
    if run.distilled is not None:
        value += f"; distilled ({run.distilled.evidence}), and sampled as its authors do"
    value = "; ".join([value, *run.config.rewards_over_time])
    return Check("settings", "warn" if remarks else "pass", " ".join(remarks) or value, float(len(remarks)))


def stability(kernel: Kernel, schedule: Schedule, unexplored: str | None = None) -> Check:
    # Every step of the grid: one that a window or a clamp leaves out today may explore in another run.
    stds = [float(kernel(*map(float, schedule.pair(index))).std) for index in range(schedule.num_steps)]
    bad = [index for index, std in enumerate(stds) if not 0 <= std < float("inf")]
    if bad or not any(schedule.stochastic):
        value = f"the noise is not a number at step(s) {bad}" if bad else "no step explores"
        return Check("stability", "fail", value)
    faults, report = list(instabilities(kernel, schedule)), inspect_kernel(kernel, schedule)
    last = report.rows[-1]
    if last.sigma_next == 0 and last.std > 0:
        faults.append(f"The last step leaves noise with std {last.std:.3g} in the video.")
    value = f"final variance {report.on_manifold_variance:.3f} (1 is right), off the data {report.off_manifold_variance:.2g}"
    text = " ".join(faults) or (f"{value}; {unexplored}" if unexplored else value)
    return Check("stability", "warn" if faults else "pass", text, report.on_manifold_variance)
