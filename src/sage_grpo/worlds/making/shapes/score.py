"""Sample a pipeline folder on held-out prompts, judge the clips, and write what was found."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.flow.kernels import Ode
from sage_grpo.flow.schedule import Schedule
from sage_grpo.inside import replace_text
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.video import contact_sheet
from sage_grpo.worlds.making.shapes.networks import load_vae
from sage_grpo.worlds.making.shapes.stages import reconstruct
from sage_grpo.worlds.shapes.judge import WEIGHTS, ShapesJudge
from sage_grpo.worlds.shapes.render import render, to_uint8
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, FPS, FRAMES, SIDE, batch_of, from_text, random_scenes, to_text


def score(folder: Path, *, prompts: int, steps: int, pictures: Path, device: torch.device) -> str:
    """Sample and judge a pipeline folder on held-out prompts; write pictures and scores.json, return the scores as a Markdown table."""
    model = ModelSpec(path=str(folder), train=False, device=str(device)).load()
    scenes = random_scenes(prompts, torch.Generator().manual_seed(1), split="heldout")
    texts = [to_text(scene, index) for index, scene in enumerate(scenes.scenes())]
    clock = time.perf_counter()
    start = torch.randn(prompts, *model.latent_shape(), generator=torch.Generator().manual_seed(2)).to(device)
    policy = Policy(model, Ode(), Schedule.shifted(steps, model.shift))
    clips = model.decode(integrate(policy, start, model.encode(texts)))
    seconds = time.perf_counter() - clock
    contact_sheet(pictures / "samples.png", list(clips[:24]), texts[:24], columns=FRAMES, cell=96)
    replace_text(pictures / "samples.txt", "\n".join(texts[:24]) + "\n")
    found, best = judge_clips(clips, texts), judge_clips(to_uint8(render(scenes, FRAMES, SIDE, SIDE)), texts)
    scores = {"model": found, "ceiling": best, "seconds": seconds}
    replace_text(pictures / "scores.json", json.dumps(scores, indent=2) + "\n")
    table = score_table(found, best)
    megabytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    print(f"{table}\n{prompts} clips in {seconds:.1f} s; the folder has {megabytes:.1f} MB", flush=True)
    return table


def judge_clips(clips: Tensor, prompts: Sequence[str]) -> dict[str, float]:
    """Mean of every part of the judge's scores."""
    scores = ShapesJudge()(clips, prompts, FPS)
    return {name: float(values.mean()) for name, values in scores.items()}


def clean_clips(folder: Path | None, prompts: Sequence[str], *, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Perfect clips of these prompts, as they are and after a folder's VAE (None: the embedded one).

    No weights of the network can do better than the second: everything that it makes goes through the VAE.
    """
    scenes = batch_of([from_text(prompt) for prompt in prompts], torch.Generator().manual_seed(seed))
    clips = to_uint8(render(scenes, FRAMES, SIDE, SIDE))
    vae = load_vae(folder or Path(str(files("sage_grpo") / "shapes" / "assets")), device)
    after = torch.cat([reconstruct(vae, part.to(device)).cpu() for part in clips.split(128)])
    return {"clean": clips, "after_vae": after}


def score_table(model: Mapping[str, float], best: Mapping[str, float]) -> str:
    """A Markdown table: the model, the ceiling, and for the attributes the score of guessing."""
    lines = ["| part | base model | clean renders | chance |", "|---|---|---|---|"]
    chance = {f"TA/{name}": 1 / len(values) for name, values in ATTRIBUTES.items()}
    chance["TA"] = sum(WEIGHTS[name] * chance[f"TA/{name}"] for name in ATTRIBUTES)
    for name in model:
        guess = f"{chance[name]:.3f}" if name in chance else ""
        lines.append(f"| {name} | {model[name]:.3f} | {best[name]:.3f} | {guess} |")
    lines.append(f"| Overall / ceiling | {model['Overall'] / best['Overall']:.1%} | 100% | |")
    return "\n".join(lines)
