"""How far a solver with few steps ends from where 400 Euler steps end, in the shapes world.

    PYTHONPATH=src python research/benchmarks/solvers.py

Root mean square of the difference of the latents, over that of the latents; 16 held-out prompts.
"""

from __future__ import annotations

import torch

from sage_grpo.models.policy import build_solver, solve
from sage_grpo.models.spec import ModelSpec
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.training.inputs import prompts_from


def main() -> int:
    """Print a table."""
    model = ModelSpec(train=False, cache=None).load()
    prompts = prompts_from("shapes", split="heldout")[:16]
    conditions = model.encode([prompt.text for prompt in prompts])
    start = torch.stack([keyed_noise(model.latent_shape(), "solvers", place) for place in range(len(prompts))])

    def end(name: str, steps: int) -> torch.Tensor:
        return solve(model, build_solver(model, name, steps), start.to(model.device), conditions)

    true = end("euler", 400)
    print("| steps | euler | ab2 |\n|---|---|---|")
    for steps in (6, 10, 14):
        errors = [float((end(name, steps) - true).norm() / true.norm()) for name in ("euler", "ab2")]
        print(f"| {steps} | {errors[0]:.4f} | {errors[1]:.4f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
