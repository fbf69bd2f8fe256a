"""A few-step model of the shapes world, to learn on: the steps of a coarse grid are fitted to the teacher's way between its levels.

The ODE is a map without chance, so that a squared error to its states does not blur by itself, as one to data would. Every coarse step learns the
mean velocity of the teacher's fine steps inside it, at the teacher's own states.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from research.pretraining.pretrain import say
from research.pretraining.score import AT_ONCE, score
from research.pretraining.shapes.options import DistillOptions
from research.pretraining.training import Inputs, Trainer
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.policy import Policy
from sage_grpo.models.spec import ModelSpec
from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.worlds.world import SHAPES


def distill(options: DistillOptions) -> int:
    """Make the teacher's trajectories, fit a copy of it to them, write it as a pipeline folder and score both; return 0."""
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    spec = ModelSpec(path=None if options.start is None else str(options.start), guidance_scale=1.0, cache=None)
    student = spec.load(options.device or None)
    known = SHAPES.texts("train")
    texts = [known[place % len(known)] for place in range(options.clips)]
    ways = trajectories(student, texts, options)
    say(started, f"{options.clips} clips of the teacher, {options.teacher_steps} steps each")
    fit(student, texts, ways, options)
    folder = options.out / "pipeline"
    student.save(folder)
    say(started, f"wrote {folder}")
    if options.score_prompts:
        score(
            SHAPES,
            folder,
            prompts=options.score_prompts,
            steps=options.steps,
            pictures=options.out,
            device=student.device,
        )
    return 0


@torch.no_grad()
def trajectories(teacher: VelocityModel, texts: list[str], options: DistillOptions) -> Tensor:
    """States of the teacher's ODE at the coarse grid's levels, noise first: levels x clips x latents."""
    conditions = teacher.encode(texts)
    policy = Policy(teacher, Ode(), Schedule(teacher.sigmas(options.teacher_steps)))
    pieces = []
    for first in range(0, len(texts), AT_ONCE):
        some = conditions[first : first + AT_ONCE]
        noises = [keyed_noise(teacher.latent_shape(), "distill", options.seed, first + n) for n in range(len(some))]
        x = torch.stack(noises).to(teacher.device)
        states = [x]
        for step in range(options.teacher_steps):
            x = policy.step(step, x, some).gaussian.mean
            if (step + 1) % options.stride == 0:
                states.append(x)
        pieces.append(torch.stack(states).cpu())
    return torch.cat(pieces, 1)


def fit(student: VelocityModel, texts: list[str], ways: Tensor, options: DistillOptions) -> None:
    """Train the student in place: from every level of the coarse grid its one step ends where the teacher's steps do."""
    grid, conditions = Schedule(student.sigmas(options.steps)), student.encode(texts)
    # Prompts of one length go through the network together: ten lengths in a batch would be ten passes.
    lengths = [tuple(tensor.shape for tensor in condition.tensors.values()) for condition in conditions]
    alike = {length: torch.tensor([n for n, other in enumerate(lengths) if other == length]) for length in set(lengths)}

    def batches(progress: float) -> Inputs:
        step, of_length = torch.randint(options.steps, ()), alike[lengths[int(torch.randint(len(texts), ()))]]
        chosen = of_length[torch.randint(len(of_length), (options.batch,))]
        x, x_next = (ways[int(step) + ahead, chosen].to(student.device) for ahead in (0, 1))
        sigma, sigma_next = grid.pair(int(step))
        return {"x": x, "v": (x_next - x) / float(sigma_next - sigma), "sigma": sigma, "chosen": chosen}

    def loss(inputs: Inputs) -> Inputs:
        asked = [conditions[place] for place in inputs["chosen"].tolist()]
        return {"loss": (student.velocity(inputs["x"], inputs["sigma"], asked) - inputs["v"]).square().mean()}

    Trainer(
        "distill",
        options,
        parameters=student.trainable(),
        loss=loss,
        batches=batches,
        minutes=0.0,
        steps=options.updates,
        peak_lr=options.lr,
        weight_decay=0.0,
        average=0.99,
    ).run()
