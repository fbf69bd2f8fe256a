"""Sample a pipeline folder on held-out prompts of its world, judge the clips, and write what was found."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research.pretraining.autoencoder import Codec, reconstruct
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.video import contact_sheet
from sage_grpo.worlds.shapes.render import to_uint8
from sage_grpo.worlds.world import PromptWorld

AT_ONCE = 64
"""Clips that are sampled together."""
SHOWN = 24
"""Clips in a picture."""


def score(world: PromptWorld, folder: Path, *, prompts: int, steps: int, pictures: Path, device: torch.device) -> str:
    """Sample and judge a pipeline folder on held-out prompts; write pictures and scores.json, return the scores as a Markdown table."""
    model = ModelSpec(path=str(folder), train=False, device=str(device), guidance_scale=1.0).load()
    scene: Any = world.scene
    render: Callable[..., Tensor] = import_module(f"{world.package}.render").render
    frames, side, _ = world.format
    scenes = scene.random_scenes(prompts, torch.Generator().manual_seed(1), split="heldout")
    texts = [scene.to_text(one, index) for index, one in enumerate(scenes.scenes())]
    clock = time.perf_counter()
    start = torch.randn(prompts, *model.latent_shape(), generator=torch.Generator().manual_seed(2)).to(device)
    policy = Policy(model, Ode(), Schedule.shifted(steps, model.shift))
    conditions = model.encode(texts)
    clips = torch.cat(
        [
            model.decode(integrate(policy, part, conditions[first : first + len(part)]))
            for first, part in zip(range(0, prompts, AT_ONCE), start.split(AT_ONCE))
        ]
    )
    seconds = time.perf_counter() - clock
    contact_sheet(pictures / "samples.png", list(clips[:SHOWN]), texts[:SHOWN], columns=frames, cell=96)
    replace_text(pictures / "samples.txt", "\n".join(texts[:SHOWN]) + "\n")
    found = judge_clips(world, clips, texts)
    best = judge_clips(world, to_uint8(render(scenes, frames, side, side)), texts)
    scores = {"model": found, "ceiling": best, "seconds": seconds}
    replace_text(pictures / "scores.json", json.dumps(scores, indent=2) + "\n")
    table = score_table(world, found, best)
    megabytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    print(f"{table}\n{prompts} clips in {seconds:.1f} s; the folder has {megabytes:.1f} MB", flush=True)
    return table


def judge_clips(world: PromptWorld, clips: Tensor, prompts: Sequence[str]) -> dict[str, float]:
    """Mean of every part of the judge's scores, over the prompts that it can score."""
    scores = world.judge()(clips, prompts, world.format[2])
    return {name: float(values.nanmean()) for name, values in scores.items()}


def clean_clips(world: PromptWorld, codec: Codec, prompts: Sequence[str], *, seed: int) -> dict[str, Tensor]:
    """Perfect clips of these prompts, as they are and after a VAE.

    The second is the reference for results, not a bound: everything that the network makes goes through the VAE, but some clips score higher.
    """
    clips = world.clips(prompts, seed=seed)
    after = torch.cat([reconstruct(codec, part.to(codec.device)).cpu() for part in clips.split(128)])
    return {"clean": clips, "after_vae": after}


def score_table(world: PromptWorld, model: Mapping[str, float], best: Mapping[str, float]) -> str:
    """A Markdown table: the model, the ceiling, and for the attributes the score of guessing."""
    lines = ["| part | base model | clean renders | chance |", "|---|---|---|---|"]
    weights: Mapping[str, float] = import_module(f"{world.package}.judge").WEIGHTS
    attributes = world.scene.ATTRIBUTES
    chance = {f"TA/{name}": 1 / len(values) for name, values in attributes.items()}
    chance["TA"] = sum(weights[name] * chance[f"TA/{name}"] for name in attributes)
    for name in model:
        guess = f"{chance[name]:.3f}" if name in chance else ""
        lines.append(f"| {name} | {model[name]:.3f} | {best[name]:.3f} | {guess} |")
    lines.append(f"| Overall / ceiling | {model['Overall'] / best['Overall']:.1%} | 100% | |")
    return "\n".join(lines)
