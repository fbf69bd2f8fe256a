"""One iteration of our trainer and its passes. What runs is `Trainer.step` on a recipe with the job's numbers; nothing is replaced."""

from __future__ import annotations

import ast
import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import meter as meters
import torch
import weights
from floor import Work, floors, hunyuan15_work, measure_rates, wan_work
from job import PROMPT, Job

from sage_grpo.models import family
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import assemble
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.offload import get_ready
from sage_grpo.training.trainer import Trainer

RECIPES = {"wan": "wan/flow_grpo", "hunyuan15": "hunyuan15_lora/flow_grpo"}
PHASES = ("rollout", "decode", "reward", "update")


def run(content: dict[str, Any], job: Job, options: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Fill in the figures of one of our variants."""
    settings = {**options["settings"], **{key: literal(text) for key, text in options["set"].items()}}
    content["settings"] = settings
    get_ready(wanted=False)  # a run does so before anything is on the GPU; here the weights come first
    begin, tiny, work = time.perf_counter(), options["tiny"], Path(options["work"])
    folder, pipeline = work / options["model"], None
    if options["model"] == "wan":
        weights.wan(folder, tiny=tiny)
    else:
        pipeline = weights.hunyuan15(folder, tiny=tiny)
    if meters.CUDA:
        torch.cuda.empty_cache()
    content["weights_seconds"], begin = time.perf_counter() - begin, time.perf_counter()
    trainer = build_trainer(configuration(options, job, folder, settings), pipeline)
    content["load_seconds"] = time.perf_counter() - begin
    content["lora"] = meters.lora_report(trainer.state.params)
    note("loaded")
    kinds = passes(trainer)
    if options["model"] == "wan":
        iterations(content, trainer, job, options, note)
        kinds = {name: run for name, run in kinds.items() if "guided" not in name}  # the iteration is made of those
    content["passes"] = meters.measure_passes(kinds, until=options["seconds"])
    content["replay_error"] = replay_error(trainer)
    rates = measure_rates(str(trainer.model.device), tiny=tiny)
    content["floor"] = {"rates": rates, "seconds": floors(work_of(trainer, options["model"]), rates)}


def configuration(options: Mapping[str, Any], job: Job, folder: Path, settings: Mapping[str, Any]) -> TrainConfig:
    """The recipe of a model with the job's numbers, and with `settings` on top."""
    out = folder.parent / f"run-{options['model']}-{options['variant']}"
    prompts = folder.parent / "prompts.txt"
    prompts.write_text(PROMPT + "\n")
    config, replace = recipe(RECIPES[options["model"]]), dataclasses.replace
    model = replace(
        config.model,
        path=str(folder),
        cache=None,
        dtype="float32" if options["tiny"] else "bfloat16",
        lora=replace(config.model.lora, rank=job.rank),
        **{name: getattr(job, name) for name in ("frames", "height", "width")},
    )
    config = replace(
        config,
        out=str(out),
        model=replace(model, guidance_scale=job.guidance),
        rewards=[RewardSpec(name="brightness:brightness")],
        data=replace(config.data, prompts=str(prompts), eval_prompts=None),
        kernel=KernelSpec(name="flow", eta=job.eta),
        rollout=replace(config.rollout, storage="bfloat16"),
        trust_region=TrustRegion(mode="none"),
        update=replace(config.update, updates_per_rollout=1, step_fraction=1.0),
        evaluate=replace(config.evaluate, every=0),
        log=replace(config.log, tensorboard=False, progress=False),
    )
    config = sized(config, job)
    for key, value in settings.items():
        config = override(config, key.split("."), value)
    return config


def sized(config: TrainConfig, job: Job) -> TrainConfig:
    """With the clips and steps of a job."""
    replace = dataclasses.replace
    window = Window(kind="fixed", start=job.first, length=job.trained)
    return replace(
        config,
        batch=replace(config.batch, prompts=1, group_size=job.group, micro_batch=1),
        rollout=replace(config.rollout, steps=job.steps, window=window),
    )


def override(config: Any, keys: list[str], value: Any) -> Any:
    """A frozen dataclass with another value at a dotted key."""
    inner = value if len(keys) == 1 else override(getattr(config, keys[0]), keys[1:], value)
    return dataclasses.replace(config, **{keys[0]: inner})


def literal(text: str) -> Any:
    """`false`, `null`, `2` and `[1, 2]` as in YAML; any other text is itself."""
    words = {"true": True, "false": False, "null": None}
    try:
        return words[text] if text in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def build_trainer(config: TrainConfig, pipeline: Any = None) -> Trainer:
    """A trainer that is ready to step, with a pipeline in place of the checkpoint's files where one is given."""
    given = mock.patch.object(family, "load_pipeline", return_value=pipeline) if pipeline is not None else nullcontext()
    with given:
        trainer = assemble(config, build(config))
    trainer.encode_prompts()
    return trainer


def iterations(
    content: dict[str, Any], trainer: Trainer, job: Job, options: Mapping[str, Any], note: Callable[[str], None]
) -> None:
    """Whole iterations of the trainer."""
    meter = meters.Meter()
    meter.count(trainer.model.transformer.proj_out, lambda: trainer.clock.phase)

    def iterate(part: Job) -> dict[str, Any]:
        trainer.config = sized(trainer.config, part)
        grid = Schedule(trainer.model.sigmas(part.steps, trainer.config.rollout.shift))
        trainer.planner = dataclasses.replace(trainer.planner, config=trainer.config, grid=grid)
        meters.sync()
        begin = time.perf_counter()
        row = trainer.step()
        meters.sync()
        seconds = {phase: row[f"time/{phase}"] for phase in PHASES}
        seconds["other"] = time.perf_counter() - begin - sum(seconds.values())
        return {
            "part": dataclasses.asdict(part),
            "seconds": seconds,
            "peak_gib": {phase: row.get(f"time/peak_gib_{phase}", 0.0) for phase in PHASES},
            "forwards": meter.take()["forwards"],
            "first_log_ratio": row["ratio/first_log"],
            "gradient_norm": row["gradient/norm"],
            "reward": row["reward/total"],
        }

    meters.measure_iterations(content, job, options, note, iterate)


def passes(trainer: Trainer) -> dict[str, Callable[[], None]]:
    """The passes of training on one clip."""
    x, sigma, conditions = inputs(trainer)

    def forward(guidance: float | None) -> None:
        with torch.no_grad():
            trainer.model.velocity(x, sigma, conditions, guidance=guidance)

    def training(guidance: float | None) -> None:
        v = trainer.model.velocity(x, sigma, conditions, guidance=guidance)
        v.backward(torch.ones_like(v))
        trainer.state.optimizer.zero_grad()

    return {
        "forward": lambda: forward(1.0),
        "training_pass": lambda: training(1.0),
        "guided_forward": lambda: forward(None),
        "guided_training_pass": lambda: training(None),
    }


def inputs(trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Latents, their noise level and the prompt."""
    model = trainer.model
    conditions = [next(iter(trainer.prompt_encoder.encoded.values()))]
    return torch.randn((1, *model.latent_shape()), device=model.device), torch.tensor(0.9), conditions


def replay_error(trainer: Trainer) -> float:
    """Largest difference between velocities with and without gradients; anything but 0 makes the first ratio differ from 1."""
    x, sigma, conditions = inputs(trainer)
    with torch.no_grad():
        first = trainer.model.velocity(x, sigma, conditions)
    return float((trainer.model.velocity(x, sigma, conditions).detach() - first).abs().max())


def work_of(trainer: Trainer, model: str) -> Work:
    """FLOPs of a forward pass."""
    config, latents = trainer.model.transformer.config, trainer.model.latent_shape()
    if model == "wan":
        return wan_work(config, latents)
    conditions = next(iter(trainer.prompt_encoder.encoded.values()))
    return hunyuan15_work(config, latents, sum(len(tensor) for tensor in conditions.tensors.values()))
