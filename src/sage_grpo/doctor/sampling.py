"""Checks of sampling: the stock pipeline, the VAE, noise, guidance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from sage_grpo.data.groups import Member
from sage_grpo.doctor.finding import Finding, graded, relative, rounding
from sage_grpo.flow.noise import keyed_noise
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.checkpoints.stock import our_latents, stock_decode, stock_latents
from sage_grpo.models.distilled import find_distilled
from sage_grpo.models.family import FamilyModel
from sage_grpo.training import update
from sage_grpo.training.planning.plan import Group, Plan, Replay
from sage_grpo.training.rollout import Rollout, Sampler
from sage_grpo.training.trainer import Trainer
from sage_grpo.training.update import Item

STEPS = 2
"""Steps of the clip that is compared with the pipeline's: the first and the last are where grids differ."""
ENOUGH = 1 << 16
"""Values of a noise that are looked at."""


@dataclass(frozen=True)
class Sample:
    """One small rollout, which all later checks share."""

    trainer: Trainer
    plan: Plan

    @cached_property
    def sampler(self) -> Sampler:
        """What the trainer samples with."""
        return self.trainer.sampler(self.plan)

    @cached_property
    def rollout(self) -> Rollout:
        """Sampled when first asked for."""
        return self.sampler.run()

    @property
    def members(self) -> list[Member]:
        """This rank's clips."""
        return [member for batch in self.plan.batches(self.trainer.world.rank) for member in batch.members]

    def group(self, member: Member) -> Group:
        """A clip's group."""
        return self.plan.groups[member.group]

    def items(self) -> list[Item]:
        """One replay of every trained step, with made-up advantages: what is checked with them must not hang on a reward.

        Ranks of one network make equally many passes, so that several take all of theirs.
        """
        items, steps = [], set()
        for replay in self._replays():
            group = self.plan.groups[replay.members[0].group]
            label = group.label(replay.step)
            if label in steps and self.trainer.world.size == 1:
                continue
            steps.add(label)
            ones = torch.ones(len(replay.members))
            signs = torch.tensor([1.0 if member.index % 2 else -1.0 for member in replay.members])
            items.append(
                Item(
                    record=self.rollout.records[replay],
                    step=replay.step,
                    label=label,
                    advantage=signs,
                    weight=ones / len(ones),
                    equalizer=self.plan.equalizer[label],
                )
            )
        return items

    def _replays(self) -> list[Replay]:
        rank = self.trainer.world.rank
        return list(dict.fromkeys(r for number in range(self.plan.updates) for r in self.plan.replays(rank, number)))


def start(model: VelocityModel) -> Tensor:
    """A noise to try a model on."""
    return keyed_noise((1, *model.latent_shape()), "doctor").to(model.device)


def distilled(model: FamilyModel, steps: int) -> Finding | None:
    """Guidance and steps against those of the authors, where the checkpoint is a distilled one; None where it is not."""
    found = find_distilled(model.spec.path, model.folder)
    if found is None:
        return None
    advice = found.advice(1.0 if model.guidance.embedded else model.guidance_scale, steps)
    return Finding(
        name="distilled",
        status="pass" if advice is None else "warn",
        value=advice or f"distilled ({found.evidence}), and sampled as its authors do",
        why="a distilled network has its guidance and its few steps inside: with guidance on top, or many steps, it burns its pictures",
        remedy="set what is named, here and wherever the model is sampled",
    )


def pipeline(model: FamilyModel, text: str, image: Tensor | None) -> tuple[Finding, Tensor]:
    """A rollout without noise against the checkpoint's own pipeline; also returns the pipeline's latents."""
    x = start(model)
    wanted = stock_latents(model, text, image, x, STEPS)
    (condition,) = model.encode([text], [image])
    gap = relative(our_latents(model, condition, x, STEPS), wanted)
    limit = rounding(model.dtype)
    finding = Finding(
        name="pipeline",
        status=graded(gap, warn=limit, fail=4 * limit),
        value=f"after {STEPS} steps at eta = 0 latents differ from the diffusers pipeline's by {gap:.2g}",
        why="what is trained must be what users of the checkpoint run: the same grid, guidance, text and network",
        remedy="compare model.shift, model.guidance_scale and model.negative_prompt with the checkpoint; else report it",
        number=gap,
    )
    return finding, wanted


def vae(model: FamilyModel, latents: Tensor) -> Finding:
    """Our decoding against one with the scaling that the VAE's own configuration states."""
    ours, wanted = model.decode(latents).double(), stock_decode(model, latents).double()
    error = float((ours - wanted).square().mean()) if ours.shape == wanted.shape else math.inf
    psnr = math.inf if error == 0 else 10 * math.log10(255**2 / error)
    return Finding(
        name="vae",
        status=graded(-psnr, warn=-45.0, fail=-35.0)
        if math.isfinite(error) and error
        else "pass"
        if not error
        else "fail",
        value=f"decoded clips differ from the VAE's own by {math.sqrt(error):.2g} of 255",
        why="latents that are scaled twice, or not at all, decode to washed-out or burnt clips that no reward can rank",
        remedy="a family's _to_vae applies the VAE's scaling exactly once; compare vae/config.json with the published one",
        number=math.sqrt(error),
    )


def noise(sample: Sample) -> Finding:
    """Start and exploration noise: standard normal, different where it should be and equal where it should be."""
    why = "clips with the same noise differ by nothing that an advantage could be about; with one noise for all prompts a run sees one draw"
    starts = {m: _flat(sample.sampler.start(sample.group(m), [m])) for m in sample.members}
    same_start = sample.trainer.config.rollout.same_noise
    faults = []
    for one, other in combinations(sample.members, 2):
        alike = _alike(starts[one], starts[other])
        if alike != _share_start(sample.group(one), sample.group(other), one, other, same_start):
            faults.append(f"{_name(one)} and {_name(other)} start from {'the same' if alike else 'different'} noise")
    steps = sorted({label for number in range(sample.plan.updates) for label in sample.plan.labels(number)})[:2]
    shape = sample.trainer.model.latent_shape()
    drawn = [(m, s, _flat(sample.sampler.keys.step([m], s, shape))) for s in steps for m in sample.members]
    for (one, step, a), (other, step_other, b) in combinations(drawn, 2):
        if _alike(a, b):
            faults.append(
                f"{_name(one)} at step {step} and {_name(other)} at step {step_other} explore with the same noise"
            )
    noises = torch.stack([*starts.values(), *(row for _, _, row in drawn)])
    off = abs(float(noises.std()) - 1.0)
    if off > 0.02 + 6 / math.sqrt(2 * noises.numel()):
        faults.append(f"its std is {float(noises.std()):.3f}, not 1")
    return Finding(
        name="noise",
        status="fail" if faults else "pass",
        value="; ".join(faults[:2]) + (f"; {len(faults) - 2} more" if len(faults) > 2 else "")
        if faults
        else f"{len(starts)} starts and {len(drawn)} explorations: std {float(noises.std()):.3f}, different where they should be",
        why=why,
        remedy="noise is keyed by (seed, iteration, group, member) in training/rollout.py: check rollout.same_noise and the prompts' own seeds",
        number=float(noises.std()),
    )


def _share_start(group: Group, other: Group, one: Member, two: Member, same_start: bool) -> bool:
    """Whether two clips are meant to start from one noise."""
    seeds = group.prompt.seed, other.prompt.seed
    same_key = group.place == other.place if seeds == (None, None) else seeds[0] == seeds[1]
    return same_key and (same_start or one.index == two.index)


def _name(member: Member) -> str:
    return f"clip {member.index} of prompt {member.group}"


def _flat(noise: Tensor) -> Tensor:
    return noise.detach().float().cpu().flatten()[:ENOUGH]


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two noises are one; independent ones of few dimensions can be close, too."""
    limit = min(0.999, max(0.5, 6 / math.sqrt(len(a))))
    return float(torch.dot(a, b) / (a.norm() * b.norm()).clamp(min=1e-30)) > limit


@torch.no_grad()
def guidance(sample: Sample, items: Sequence[Item]) -> Finding:
    """Rollout and replay against the velocity at the guidance that the configuration asks for."""
    model, scale = sample.trainer.model, sample.trainer.config.model.training_guidance
    asked = model.guidance_scale if scale is None else scale
    gaps = []
    for item in dict.fromkeys((0, len(items) - 1)):
        record, index = items[item].record, items[item].step
        x = record.x.to(model.device, torch.float32)
        sigma, _ = record.policy.schedule.pair(index)
        wanted = model.velocity(x, sigma, record.conditions, guidance=scale)
        gaps.append(("update", relative(update.replay(items[item], model.device).velocity, wanted)))
        gaps.append(("rollout", _rollout_gap(items[item], x, wanted)))
    where, largest = max(gaps, key=lambda row: row[1])
    status, value = (
        graded(largest, warn=1e-4, fail=1e-2),
        f"scale {asked:g}; {where} and a pass at that scale differ by {largest:.2g}",
    )
    why = "a ratio between a guided and an unguided velocity compares two models: its gradient teaches guidance, not the reward"
    remedy = "sample and replay with the guidance of model.guidance_scale and model.guidance_in_training"
    if status == "pass" and asked != model.guidance_scale:
        status = "warn"
        value += f"; but evaluation and generate sample at scale {model.guidance_scale:g}"
        why = "what is trained without guidance is not what is sampled with it: a gain there may be less, or none"
        remedy = "model.guidance_in_training true trains what is sampled; or sample as it is trained, with model.guidance_scale 1"
    return Finding(name="guidance", status=status, value=value, why=why, remedy=remedy, number=largest)


def _rollout_gap(item: Item, x: Tensor, wanted: Tensor) -> float:
    """How far the rollout's own log-probabilities are from those of a velocity; sizes differ by steps, so in units of noise."""
    record = item.record
    if record.log_prob_old is None:  # a fresh noise level, where the rollout has not been
        return 0.0
    x_next = record.x_next.to(x.device, torch.float32)
    law = record.policy.at(item.step, x, wanted).gaussian.expand(len(x_next))
    return float((law.log_prob(x_next) - record.log_prob_old.to(x.device)).abs().max())
