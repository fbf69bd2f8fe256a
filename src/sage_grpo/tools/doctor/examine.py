"""The check-up from end to end: cheap checks first, one small rollout that all later ones share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from sage_grpo.distributed.world import World
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.policy import pictures_of
from sage_grpo.plan.architecture import Architecture
from sage_grpo.plan.description import RunDescription, describe
from sage_grpo.run.session import assemble
from sage_grpo.tools.doctor import DoctorSpec, checkpoint, learning, machine, reward
from sage_grpo.tools.doctor.check import ORDER, Check
from sage_grpo.tools.doctor.learning import Sample
from sage_grpo.tools.inspect import instabilities
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.scoring import metadata_of
from sage_grpo.training.trainer import Trainer

Checks = Iterator[Check]
BROKEN = (ValueError, RuntimeError, OSError, SafetensorError)
"""Errors of loading and computing: they fail a check, and the check-up goes on."""


def examine(
    config: TrainConfig,
    spec: DoctorSpec,
    tell: Callable[[Check], None] = lambda check: None,
    *,
    world: World | None = None,
) -> list[Check]:
    """All checks in order; `tell` gets each at once. Checks that depend on a failed one are left out."""
    found: list[Check] = []
    for check in _checks(config, spec, world or World()):
        tell(check)
        found.append(check)
    return found


def over_ranks(found: list[Check], world: World) -> list[Check]:
    worse, own = {}, {one.name: ORDER.index(one.status) for one in found}
    for number, text in enumerate(world.texts(json.dumps([asdict(one) for one in found]))):
        for check in [Check(**row) for row in json.loads(text)]:
            if check.status in ("warn", "fail") and own.get(check.name, -1) < ORDER.index(check.status):
                worse[check.name] = replace(check, value=f"rank {number}: {check.value}")
    return list(worse.values())


def _checks(config: TrainConfig, spec: DoctorSpec, world: World) -> Checks:
    """All checks. A stage that fails yields a check of its own name, and the stages that need it are left out."""
    yield machine.versions()
    yield machine.device(config.model, world.device)
    plan = machine.plan(config, world.size)
    yield plan
    if plan.status == "fail":
        return
    files, remarks = machine.files(config, world.size)
    yield files
    if files.status == "fail":
        return
    try:
        parts = build(config, world)
        model = cast(FamilyModel, parts.model)  # one of your own has all that a description asks for
        loaded = Architecture.of(model, "the loaded model")
        run = describe(config, world.processes, loaded)
    except BROKEN as error:
        yield _stopped("loading", error)
        return
    yield machine.settings(run, remarks)
    if not parts.model.trainable():
        yield Check("gradients", "fail", "no parameter is trained")
        return
    try:
        trainer = assemble(small(config, spec), parts, world)
    except BROKEN as error:
        yield _stopped("plan", error)
        return
    sample = prepare(trainer)
    yield from _guarded("schedule", of_schedule(run))
    yield from _guarded("conditioning", of_conditioning(sample))
    yield from _guarded("sampling", of_sampling(sample))
    yield from _guarded("learning", of_learning(sample))


def _guarded(name: str, stage: Checks) -> Checks:
    try:
        yield from stage
    except BROKEN as error:
        yield _stopped(name, error)


def _stopped(name: str, error: Exception) -> Check:
    return Check(name, "fail", f"{type(error).__name__}: {error}")


def small(config: TrainConfig, spec: DoctorSpec) -> TrainConfig:
    """The run's own configuration with few clips, only the prompts for them, no workers, and every exploring step trained."""
    micro = min(config.batch.micro_batch, spec.members)
    batch = replace(config.batch, prompts=spec.prompts, group_size=spec.members, micro_batch=micro)
    update, data = replace(config.update, step_fraction=1.0), replace(config.data, encode_ahead=1)
    rollout = replace(config.rollout, on="here")
    evaluate = replace(config.evaluate, prompts=1)
    return replace(config, batch=batch, update=update, data=data, rollout=rollout, evaluate=evaluate)


def prepare(trainer: Trainer) -> Sample:
    prompts = trainer.state.stream.peek(trainer.config.batch.prompts)
    return Sample(trainer, trainer.planner.plan(0, prompts))


def of_schedule(run: RunDescription) -> Checks:
    if run.config.explores:
        yield machine.stability(run.planner.kernel, run.plan.groups[0].schedule, run.unexplored())
    else:
        yield Check("stability", "skip", f"objective.kind {run.config.objective.kind}: no step explores")


def of_conditioning(sample: Sample) -> Checks:
    """The network's inputs, and the stock pipeline on the same prompt; text encoders are loaded here only."""
    model, prompts = sample.trainer.model, sample.plan.prompts
    prompts = [prompts[0], *[one for one in prompts if one.text != prompts[0].text][:1]]
    texts, images = [prompt.text for prompt in prompts], [pictures_of(prompt) for prompt in prompts]
    conditions = model.encode(texts, images)
    x = checkpoint.start(model)
    if len(texts) > 1:
        yield checkpoint.prompt(model, x, conditions)
    yield checkpoint.padding(model, x, images)
    yield from _of_pipeline(sample.trainer, x, texts[0], images[0])
    model.unload_text()


def _of_pipeline(trainer: Trainer, latents: Tensor, text: str, image: Tensor | None) -> Checks:
    model = trainer.model
    if not isinstance(model, FamilyModel):
        for name in ("pipeline", "vae"):
            yield Check(name, "skip", f"{type(model).__name__} has no diffusers pipeline")
        return
    alone = trainer.world.control is None
    reason = checkpoint.why_not_stock(model) if alone else "run the check-up in one process for this"
    if reason is None:
        check, latents = checkpoint.pipeline(model, text, image)
        yield check
    else:
        yield Check("pipeline", "skip", reason)
    unknown = checkpoint.why_unknown(model)
    if unknown is not None:
        yield Check("vae", "skip", unknown)
        return
    with trainer.engine.vae.decoding():
        yield checkpoint.vae(model, latents)


def of_sampling(sample: Sample) -> Checks:
    sample.trainer.encode_prompts()
    yield learning.guidance(sample, sample.items())
    yield from of_reward(sample, sample.trainer.engine.decode(sample.rollout))


def of_reward(sample: Sample, videos: Tensor) -> Checks:
    trainer, plan = sample.trainer, sample.plan
    members, latents = trainer.engine.scored(plan), trainer.engine.latents(sample.rollout)
    prompts = plan.prompts
    places = torch.tensor([member.group for member in members])

    def score(which: Tensor, asked: Sequence[int]) -> Tensor:
        shown = [prompts[place] for place in asked]
        rows = [metadata_of(prompt) for prompt in shown]
        asked_of = None if latents is None else latents[which.to(latents.device)]
        texts, fps = [prompt.text for prompt in shown], trainer.model.video.fps
        routes = [prompt.rewards for prompt in shown]
        scores, _ = trainer.reward.score(
            videos[which], texts, fps, rows, latents=asked_of, routes=routes, iteration=plan.iteration
        )
        return scores.total.double().cpu()

    allowed = trainer.config.max_failed_fraction
    if trainer.reward.compares:
        yield reward.valid(trainer.engine.gather(trainer.engine.score(videos, plan)).total, allowed)
        reason = "the reward compares clips of one group, so that their scores depend on one another"
        yield Check("reward batch", "skip", reason)
        return
    first = score(torch.arange(len(members)), places.tolist())
    valid = reward.valid(first, allowed)
    yield valid
    if trainer.world.any(valid.status == "fail"):  # all ranks score together, or none
        return
    scored = trainer.engine.gather(trainer.engine.score(videos, plan, latents=latents))
    rows = torch.tensor([member.group * plan.group_size + member.index for member in members])
    scoring = reward.measure(score, places, scored.total[rows].double()).finite()
    eta = None if not trainer.config.explores else trainer.config.kernel.eta
    wild = eta is not None and any(instabilities(trainer.planner.kernel, plan.groups[0].schedule))
    yield reward.spread(scoring, eta=eta, overshoots=wild)
    yield reward.batch(scoring)
    yield reward.prompts(scoring)
    yield reward.statistics(scoring, videos[first.isfinite()], trainer.model.video.fps)


def of_learning(sample: Sample) -> Checks:
    trainer, items = sample.trainer, sample.items()
    yield learning.ratio(sample, items)
    yield learning.gradients(trainer, {item.network for item in items})
    before = learning.velocities(trainer, items)
    yield learning.update_moves(trainer)
    yield learning.step_size(trainer, items, before)
    yield learning.ranks(trainer.state.params, trainer.world)
    yield learning.trust_region(sample, items)
    prompt = sample.plan.prompts[0]
    conditions = trainer.model.encode([prompt.text], [pictures_of(prompt)])
    yield checkpoint.save(trainer, checkpoint.start(trainer.model), conditions)
