"""Train a learned reward: clips of many prompts, votes of annotators who are sometimes wrong, and the loss of Bradley and Terry."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from research.pretraining.pretrain import say
from research.pretraining.scenes.faults import spoilt_groups
from research.pretraining.scenes.reward_options import RewardOptions
from research.pretraining.scenes.votes import agreement, differences, impressions, judged, people, votes
from research.pretraining.training import Inputs, Trainer
from research.scenes.learned import PARTS, Scorer, ScorerConfig, looked_at, raw_scores, save_scorer
from research.scenes.scene import Scene, Split, random_scenes, to_text
from research.scenes.world import SCENES
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.utils.json_schema import finite
from sage_grpo.utils.safe_io import replace_text

STEPS = (4, 6, 10, 20)
"""Steps with which a model's clips are sampled, in turn: a policy will make better and worse ones."""
SAMPLED = 256
"""Prompts whose clips are sampled together: a pass of so small a model takes a GPU hardly longer for many."""
DECODED = 64
"""Clips that are decoded together: each takes a tenth of a gigabyte."""
TOLD = 0.05
"""Pairs whose truth differs by less are not counted: nobody could tell them apart."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Clips in groups of one prompt, and the votes between them."""

    prompts: list[str]
    """Of every clip."""
    clips: Tensor
    """uint8 N x F x H x W x 3, all frames."""
    told: Tensor
    """Share of annotators who prefer the first of each pair, (N / group) x pairs x 3."""


def train_reward(options: RewardOptions) -> int:
    """Make clips, have them voted on, train, measure, and write the reward; return 0."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.out.mkdir(parents=True, exist_ok=True)
    clock = time.perf_counter()
    train = make_pool(options, options.prompts, "train", device)
    say(clock, f"{len(train.clips)} clips of {options.prompts} prompts, {train.told[..., 0].numel()} pairs with votes")
    scorer = Scorer(ScorerConfig(width=options.width, layers=options.layers, frames=options.frames)).to(device)
    fit(scorer, train, options)
    scorer.eval().requires_grad_(False)
    raw = raw_scores(scorer, train.clips, train.prompts)
    scorer.config = replace(
        scorer.config, mean=tuple(raw.mean(0).tolist()), std=tuple(raw.std(0).clamp_min(1e-6).tolist())
    )
    save_scorer(scorer, options.out)
    say(clock, f"wrote {options.out}")
    found = measure(scorer, make_pool(options, options.heldout, "heldout", device), options, device)
    facts = {"options": finite(asdict(options)), "seconds": time.perf_counter() - clock}
    replace_text(options.out / "scores.json", json.dumps({**found, **facts}, indent=1) + "\n")
    print(table(found), flush=True)
    return 0


def make_pool(options: RewardOptions, prompts: int, split: Split, device: torch.device) -> Pool:
    """Clips and votes for so many prompts of a split."""
    # Other scenes and faults in each split, but the same annotators.
    generator = torch.Generator().manual_seed(2 * options.seed + (split == "heldout"))
    factors = people(options, torch.Generator().manual_seed(options.seed))
    scenes = random_scenes(prompts, generator, split).scenes()
    sampled = round(options.sampled_share * prompts) if options.model is not None else 0
    texts, clips = spoilt_groups(scenes[sampled:], options.group, generator, device)
    if options.model is not None and sampled:
        more_texts, more = sampled_groups(options.model, scenes[:sampled], options.group, generator, device)
        texts, clips = texts + more_texts, torch.cat([clips, more])
    told = impressions(SCENES.judge(), clips, texts, options, factors, generator, device)
    return Pool(prompts=texts, clips=clips, told=votes(told, options.group))


def sampled_groups(
    folder: Path, scenes: Sequence[Scene], group: int, generator: torch.Generator, device: torch.device
) -> tuple[list[str], Tensor]:
    """Prompts and clips of a model, a group for every scene, each clip of it with another number of steps."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if device.type == "cuda" else "float32"
    spec = ModelSpec(
        path=str(folder), train=False, device=str(device), dtype=dtype, guidance_scale=1.0, vae_slicing=False
    )
    model = spec.load()
    templates = torch.randint(1 << 16, (len(scenes),), generator=generator).tolist()
    texts = [to_text(scene, template) for scene, template in zip(scenes, templates)]
    policies = [Policy(model, Ode(), Schedule.shifted(steps, model.shift)) for steps in STEPS]
    clips: list[Tensor] = []
    for start in range(0, len(texts), SAMPLED):
        some = texts[start : start + SAMPLED]
        conditions = model.encode(some)
        columns = []
        for place in range(group):
            noise = torch.randn(len(some), *model.latent_shape(), generator=generator).to(device)
            latents = integrate(policies[place % len(policies)], noise, conditions)
            columns.append(torch.cat([model.decode(part) for part in latents.split(DECODED)]))
        clips += torch.stack(columns, dim=1).flatten(0, 1).unbind(0)
    return [text for text in texts for _ in range(group)], torch.stack(clips)


def fit(scorer: Scorer, pool: Pool, options: RewardOptions) -> None:
    """Minimize the cross entropy between votes and the logistic function of a pair's difference of scores."""
    device, group = scorer.heads.device, options.group
    seen = pool.clips[:, looked_at(pool.clips.shape[1], options.frames)].to(device)  # the only frames it looks at
    text, told = scorer.read(pool.prompts).to(device), pool.told.to(device)
    draw = torch.Generator().manual_seed(options.seed)

    def batches(progress: float) -> Inputs:
        chosen = torch.randint(len(told), (options.batch,), generator=draw)
        members = (chosen[:, None] * group + torch.arange(group)).flatten().to(device)
        return {"clips": seen[members], "text": text[members], "told": told[chosen.to(device)]}

    def loss(inputs: Inputs) -> Inputs:
        gap = differences(scorer(inputs["clips"], inputs["text"]), group)
        each = F.binary_cross_entropy_with_logits(gap, inputs["told"], reduction="none").mean((0, 1))
        return {"loss": each.sum(), **{part: each[place] for place, part in enumerate(PARTS)}}

    Trainer(
        "reward",
        options,
        parameters=dict(scorer.named_parameters()),
        loss=loss,
        batches=batches,
        minutes=options.minutes,
        steps=options.steps,
        peak_lr=options.lr,
        weight_decay=0.05,
        average=0.99,
    ).run()


def measure(scorer: Scorer, pool: Pool, options: RewardOptions, device: torch.device) -> dict[str, Any]:
    """Share of pairs that the reward orders as the majority of votes does and as the truth does, and the votes as the truth does."""
    group, scores = options.group, raw_scores(scorer, pool.clips, pool.prompts).cpu()
    truth = judged(SCENES.judge(), pool.clips, pool.prompts, device, PARTS)
    right, said = differences(truth, group), pool.told - 0.5
    by_votes = {}
    for place, part in enumerate(PARTS):
        counted = (right[..., place].abs() > TOLD) & (said[..., place] != 0)
        same = said[..., place][counted].sign() == right[..., place][counted].sign()
        by_votes[part] = float(same.float().mean())
    return {
        "reward and votes": agreement(scores, said, group),
        "reward and truth": agreement(scores, right, group, TOLD),
        "votes and truth": by_votes,
        "pairs": int(said[..., 0].numel()),
    }


def table(found: dict[str, Any]) -> str:
    """The agreements as lines for people."""
    rows = [f"{'held-out pairs':<18}" + "".join(f"{part:>8}" for part in PARTS)]
    for name, values in found.items():
        if isinstance(values, dict):
            rows.append(f"{name:<18}" + "".join(f"{values[part]:>8.1%}" for part in PARTS))
    return "\n".join(rows)
