"""Which denoising steps a trained miniature owes its score to: base and trained weights take turns within one rollout.

    PYTHONPATH=src python research/benchmarks/where.py CHECKPOINT [CHECKPOINT ...] --out where.jsonl

CHECKPOINT is a folder of a run's `checkpoints`, or of a comparison's `unfinished`. Every held-out prompt is sampled by the ODE from the same
noise; a pattern such as `bbbbtt` runs its first four steps with the base's weights and its last two with the trained ones. A part that falls
when only steps are trained that were never explored is a side effect: nothing in the run's gradient could see it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from sage_grpo.models.base import VelocityModel
from sage_grpo.recipes import recipe
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.tools.compare.prepare import MINIATURE
from sage_grpo.training.reference import Snapshot
from sage_grpo.training.state import load_weights
from sage_grpo.worlds.shapes.judge import ShapesJudge
from sage_grpo.worlds.shapes.scene import FPS
from sage_grpo.worlds.world import SHAPES

RECIPE = recipe("shapes/branch")


def patterns(steps: int) -> list[str]:
    """Base alone, trained alone, trained from a step on, trained until a step; each once."""
    late = ["b" * early + "t" * (steps - early) for early in range(steps + 1)]
    early = ["t" * first + "b" * (steps - first) for first in range(1, steps)]
    return [late[-1], late[0], *late[1:-1], *early]


@torch.no_grad()
def sampled(model: VelocityModel, base: Snapshot, pattern: str, texts: Sequence[str]) -> torch.Tensor:
    """Clips of these prompts; the live weights are the trained ones."""
    conditions = model.encode(list(texts), [None] * len(texts))
    sigmas = [float(sigma) for sigma in model.sigmas(len(pattern), None)]
    x = torch.stack(
        [keyed_noise(model.latent_shape(), "eval", RECIPE.evaluate.seed, place, 0) for place in range(len(texts))]
    )
    x = x.to(model.device)
    for step, whose in enumerate(pattern):
        sigma = torch.full((len(x),), sigmas[step], device=x.device)
        if whose == "b":
            with base.applied():
                v = model.velocity(x, sigma, conditions)
        else:
            v = model.velocity(x, sigma, conditions)
        x = x + (sigmas[step + 1] - sigmas[step]) * v
    return model.decode(x)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=None, help="append the rows to this file")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)
    small = {key.removeprefix("model."): value for key, value in MINIATURE.items() if key.startswith("model.")}
    model, judge = dataclasses.replace(RECIPE.model, **small).load(), ShapesJudge()
    base = Snapshot(model.trainable())
    texts = SHAPES.texts("heldout")[: options.prompts]
    for folder in options.checkpoints:
        weights = load_weights(folder, model)
        state = json.loads((folder / "state.json").read_text())
        config = state["config"]
        facts = {
            "seed": config["seed"],
            "iteration": state["iteration"],
            "at": config["rollout"]["window"]["at"],
            "lr": config["optimizer"]["lr"],
            "prompts": config["batch"]["prompts"],
        }
        with torch.no_grad():
            for name, parameter in model.trainable().items():
                parameter.copy_(weights[name])
        for pattern in patterns(options.steps):
            scores = judge(sampled(model, base, pattern, texts), texts, FPS)
            row = {**facts, "pattern": pattern, **{name: float(scores[name].mean()) for name in judge.names}}
            print(json.dumps(row), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
