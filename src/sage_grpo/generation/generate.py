"""Clips of prompts: options, seeds and file names, and sampling."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sage_grpo.config.ranges import Count, Seed, checked
from sage_grpo.models.spec import ModelSpec
from sage_grpo.run.saved import Choice, read_config
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.solvers import SolverName
from sage_grpo.utils.text import progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    from sage_grpo.data.prompts import Prompt
    from sage_grpo.models.base import VelocityModel
    from sage_grpo.models.policy import Policy
    from sage_grpo.types import Conditioning, Sound


MEANT = (".txt", ".csv", ".json", ".jsonl", ".md", ".tsv", ".text", ".yaml", ".yml", ".parquet", ".xlsx", ".ndjson")
"""Suffixes that mark a prompt option as a file."""


@checked
class GenerateSpec(Choice):
    """Options of a generation."""

    model: ModelSpec = ModelSpec(train=False)
    """The model; by default the run's, or the included miniature."""
    prompts: list[str] | str = ""
    """A prompt, a list of prompts, a file (.txt, .csv, .json or .jsonl), starter, starter_eval or shapes."""
    images: list[str] = field(default_factory=list)
    """First frames for image-to-video models: one per prompt, or one for all."""
    kernel: KernelSpec = KernelSpec(name="ode")
    """The sampler; ode is deterministic."""
    solver: SolverName = "euler"
    """Solver of the ode kernel: euler, ab2 (second order), or checkpoint (its own scheduler)."""
    deterministic_last: bool | None = None
    """End with an ODE step; null does so if the sampler would leave noise in the clip."""
    steps: Count = 30
    """Denoising steps."""
    per_prompt: Count = 1
    """Clips per prompt."""
    batch: Count = 1
    """Clips per network pass; does not change the clips."""
    seed: Seed = 0
    """Seed of the first clip; later clips take the next seeds. Seeds in a prompt file win."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        if self.solver != "euler" and self.kernel.name != "ode":
            raise ValueError(
                f'solver "{self.solver}" does not explore, but kernel.name is "{self.kernel.name}": leave one of them out.'
            )

    @classmethod
    def of_run(cls, run: str, *, trust: bool) -> Self:
        """The model of a run as it was trained; `trust` as in `read_config`."""
        return cls(run=run, model=read_config(Path(run), trust=trust, rewards=False).model)


@dataclass(frozen=True)
class ClipRequest:
    """One clip to generate."""

    prompt: Prompt
    seed: int
    file: str


def sample(
    options: GenerateSpec, model: VelocityModel, clips: Sequence[ClipRequest]
) -> Iterator[tuple[Sequence[ClipRequest], Tensor, Sound | None]]:
    from sage_grpo.models.base import sound_of
    from sage_grpo.models.policy import conditions_of

    conditions = conditions_of(model, [clip.prompt for clip in clips])
    model.unload_text()
    with progress_bar("sampling", len(clips) * options.steps, shown=options.progress) as advance:
        for first in range(0, len(clips), options.batch):
            some = clips[first : first + options.batch]
            latents = _sample(options, model, some, conditions[first : first + options.batch], advance)
            yield some, model.decode(latents), sound_of(model, latents)


def clips_of(options: GenerateSpec, prompts: Sequence[Prompt] | None = None) -> list[ClipRequest]:
    prompts = prompts_of(options) if prompts is None else prompts
    if options.images and len(options.images) not in (1, len(prompts)):
        raise ValueError(f"{len(options.images)} images for {len(prompts)} prompts: give one image, or one per prompt.")
    clips: list[ClipRequest] = []
    for place, prompt in enumerate(prompts):
        if options.images:
            prompt = replace(prompt, image=Path(options.images[place if len(options.images) > 1 else 0]))
        for copy in range(options.per_prompt):
            seed = options.seed + len(clips) if prompt.seed is None else prompt.seed + copy
            name = re.sub(r"[^a-z0-9]+", "-", prompt.text.lower()).strip("-")[:48] or "clip"
            clips.append(ClipRequest(prompt, seed, f"{len(clips):04d}-{name}.mp4"))
    return clips


def prompts_of(options: GenerateSpec) -> list[Prompt]:
    from sage_grpo.data.prompts import Prompt
    from sage_grpo.training.inputs import NAMES, prompts_from

    given = [options.prompts] if isinstance(options.prompts, str) else options.prompts
    if not given or given == [""]:
        raise ValueError('There is nothing to generate: give --prompts "a red ball rolls" or --prompts file.txt.')
    blank = [place for place, text in enumerate(given, 1) if not text.strip()]
    if blank:
        raise ValueError(f"Prompt {blank[0]} of {len(given)} is empty: write what is to be seen, or leave it out.")
    # a misspelled file name must not become a prompt
    if len(given) == 1 and (given[0] in NAMES or Path(given[0]).suffix.lower() in MEANT or os.path.isfile(given[0])):
        return prompts_from(given[0], split="train")
    return [Prompt(text) for text in given]


def _policy(options: GenerateSpec, model: VelocityModel) -> Policy:
    from sage_grpo.models.policy import Policy
    from sage_grpo.samplers.schedule import Schedule
    from sage_grpo.samplers.sde_steps import explore

    grid = Schedule(model.sigmas(options.steps))
    kernel = options.kernel.build(grid)
    return Policy(model, kernel, explore(grid, [True] * options.steps, kernel, options.deterministic_last))


def _sample(
    options: GenerateSpec,
    model: VelocityModel,
    clips: Sequence[ClipRequest],
    conditions: Sequence[Conditioning],
    advance: Callable[[], None],
) -> Tensor:
    """The latents of a batch; each clip's noise depends on its own seed alone."""
    import torch

    from sage_grpo.models.policy import build_solver, integrate, solve
    from sage_grpo.samplers.noise import keyed_noise

    shape, device = model.latent_shape(), model.device

    def progress(done: int, total: int) -> None:
        for _ in clips:
            advance()

    def noise(*purpose: int | str) -> Tensor:
        return torch.stack([keyed_noise(shape, "generate", clip.seed, *purpose) for clip in clips]).to(device)

    start = noise("start")
    if options.kernel.name == "ode":
        return solve(model, build_solver(model, options.solver, options.steps), start, conditions, progress=progress)
    return integrate(_policy(options, model), start, conditions, lambda step: noise("step", step), progress)
