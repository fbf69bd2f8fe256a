"""Checks that need no weights: versions, devices, files, and what the sampler will do on its schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version

import torch

from sage_grpo.data.prompts import Prompt
from sage_grpo.doctor.finding import Finding, Status, skipped
from sage_grpo.flow.kernels import EXACT, Kernel
from sage_grpo.flow.schedule import Schedule
from sage_grpo.inspector import inspect_kernel, instabilities
from sage_grpo.models.checkpoints.checkpoint import check_folder, resolve
from sage_grpo.models.devices import choose_device
from sage_grpo.models.spec import ModelSpec
from sage_grpo.session.preflight import needs, preflight, prompt_remarks
from sage_grpo.training.config import TrainConfig

LIBRARIES = ("torch", "diffusers", "transformers", "peft")
LITTLE_FREE = 0.5
"""Less of a GPU's memory free than this share means that somebody else is on it."""


def versions() -> Finding:
    """The libraries against the oldest versions that are supported."""
    why = "the model families are written against these libraries' own modules: older ones compute something else, or crash"
    try:
        wanted = dict(re.findall(r"^([\w-]+)>=([\d.]+)", line)[0] for line in _plain(requires("sage-grpo") or []))
    except PackageNotFoundError:
        return skipped("versions", "the package is not installed, so its requirements are unknown", why)
    found = {name: version(name) for name in LIBRARIES}
    old = [name for name in LIBRARIES if name in wanted and _key(found[name]) < _key(wanted[name])]
    return Finding(
        name="versions",
        status="fail" if old else "pass",
        value=", ".join(
            f"{name} {found[name]}" + (f" (needs {wanted[name]})" if name in old else "") for name in found
        ),
        why=why,
        remedy="pip install -U " + " ".join(f"'{name}>={wanted[name]}'" for name in old or LIBRARIES if name in wanted),
    )


def _plain(lines: list[str]) -> list[str]:
    """Requirements that always hold: those of extras have a marker."""
    return [line for line in lines if ";" not in line and re.match(r"[\w-]+>=[\d.]+", line)]


def _key(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def device(spec: ModelSpec, place: torch.device | None = None) -> Finding:
    """Where the run computes, and whether that goes with its dtype."""
    why = "bfloat16 is hundreds of times slower on a CPU, and a GPU that is shared runs out of memory after an hour"
    chosen = choose_device(spec.device) if place is None else place
    status: Status = "pass"
    if chosen.type != "cuda":
        slow = spec.dtype == "bfloat16"
        value = f"{chosen.type}, {torch.get_num_threads()} threads, {spec.dtype}"
        remedy = "set model.dtype to float32, or take a GPU"
        return Finding(name="device", status="warn" if slow else "pass", value=value, why=why, remedy=remedy)
    free, total = torch.cuda.mem_get_info(chosen)
    knows = spec.dtype != "bfloat16" or torch.cuda.is_bf16_supported()
    if not knows:
        status = "fail"
    elif free < LITTLE_FREE * total:
        status = "warn"
    return Finding(
        name="device",
        status=status,
        value=f"{torch.cuda.get_device_name(chosen)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, {spec.dtype}"
        + ("" if knows else ", which it cannot compute in"),
        why=why,
        remedy="end what else runs on the GPU (nvidia-smi), or take another with model.device"
        if knows
        else "use float32",
        number=free / total,
    )


def files(config: TrainConfig, ranks: int = 1) -> Finding:
    """Everything that the configuration names: there, readable and whole, before anything large is loaded."""
    why = "a weight that is missing gets random values, and a tokenizer without its files an empty vocabulary: both look plausible"
    remedy = "get what is named, or give the right path"
    try:
        preflight(config, ranks)
        named = list(needs(config))
        away = [need.value for need in named if not need.is_here]
        if config.model.family is None and config.model.path not in away:
            check_folder(resolve(config.model))
    except (ValueError, OSError) as error:
        return Finding(name="files", status="fail", value=str(error), why=why, remedy=remedy)
    there = f"the checkpoint{' and ' if named else ''}{', '.join(need.key for need in named)}"
    value = f"{there}: whole" if not away else f"would be downloaded: {', '.join(away)}"
    return Finding(name="files", status="pass", value=value, why=why, remedy=remedy)


def prompts(training: Sequence[Prompt], held_out: Sequence[Prompt]) -> Finding:
    """Training prompts against held-out ones, and each against copies of itself."""
    found = prompt_remarks(training, held_out)
    return Finding(
        name="prompts",
        status="warn" if found else "pass",
        value=" ".join(found) or f"{len(training)} to train on, {len(held_out)} held out, all different",
        why="scores of prompts that are trained on say nothing about others, and a prompt that is there twice counts twice",
        remedy="keep data.eval_prompts apart from data.prompts, and every prompt once in its file",
        number=float(len(found)),
    )


def variance(kernel: Kernel, schedule: Schedule) -> Finding:
    """The variance of every step that explores: a number, and not below 0."""
    name, why = "variance", "a step with a negative variance has no log-probability: its samples and gradients are NaN"
    remedy = (
        "lower kernel.eta or rollout.shift, take more rollout.steps, or kernel.name sage_exact, which needs no clamp"
    )
    # Every step of the grid: one that a window or a clamp leaves out today may explore in another run.
    found = [float(kernel(*map(float, schedule.pair(index))).std) for index in range(schedule.num_steps)]
    bad = [index for index, std in enumerate(found) if not 0 <= std < float("inf")]
    stds = [std for std, explores in zip(found, schedule.stochastic) if explores]
    if bad or not stds:
        what = f"not a number at step(s) {bad}" if bad else "no step explores"
        return Finding(name=name, status="fail", value=what, why=why, remedy=remedy)
    value = f"std {min(stds):.3g} to {max(stds):.3g} over {len(stds)} steps"
    return Finding(name=name, status="pass", value=value, why=why, remedy=remedy)


def last_step(kernel: Kernel, schedule: Schedule, unexplored: str | None = None) -> Finding:
    """No noise of its own in the last step, which nothing takes out again; `unexplored` tells of steps before it that were left
    deterministic for the same reason."""
    row = inspect_kernel(kernel, schedule).rows[-1]
    left = row.std if row.sigma_next == 0 else 0.0
    return Finding(
        name="last step",
        status="warn" if left > 0 else "pass",
        value=f"noise with std {left:.3g} stays in the video" + (f"; {unexplored}" if unexplored else ""),
        why="the reward judges that noise, and the policy learns about it instead of about the clip",
        remedy=f"leave rollout.deterministic_last out (or true), or take kernel.name {EXACT}",
        number=left,
    )


def stability(kernel: Kernel, schedule: Schedule) -> Finding:
    """Whether a perfect network would end at its data with this kernel on this schedule."""
    found, report = instabilities(kernel, schedule), inspect_kernel(kernel, schedule)
    return Finding(
        name="stability",
        status="warn" if found else "pass",
        value=" ".join(found)
        or f"final variance {report.on_manifold_variance:.3f} (1 is right), off the data {report.off_manifold_variance:.2g}",
        why="a sampler that overshoots makes clips that the reward can only call bad",
        remedy="look at `sage-grpo inspect` with this kernel and schedule",
        number=report.on_manifold_variance,
    )
