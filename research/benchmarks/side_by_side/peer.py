"""One iteration of Flow-Factory's GRPO trainer. What runs is its own code on its own example configuration with the job's numbers;
methods are wrapped by a stopwatch, none is replaced. Its checkout stays outside this repository: `run.py --peer PATH`."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import meter as meters
import torch
import weights
import yaml
from job import PROMPT, Job

EXAMPLE = Path("examples") / "grpo" / "lora" / "wan21" / "t2v.yaml"


def run(content: dict[str, Any], job: Job, options: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Fill in the figures of the peer."""
    checkout = Path(options["peer"])
    sys.path.insert(0, str(checkout / "src" if (checkout / "src").is_dir() else checkout))
    logging.getLogger().setLevel(logging.WARNING)
    from flow_factory.hparams import Arguments
    from flow_factory.trainers import load_trainer

    begin, work = time.perf_counter(), Path(options["work"])
    folder = weights.wan(work / "wan", tiny=options["tiny"])
    content["weights_seconds"], begin = time.perf_counter() - begin, time.perf_counter()
    example = yaml.safe_load((checkout / EXAMPLE).read_text())
    values = configuration(example, job, folder, work / "run-peer")
    content["settings"] = options["settings"]
    for key, value in options["settings"].items():
        section, name = key.split(".")
        values[section][name] = value
    trainer = load_trainer(Arguments.from_dict(values))
    content["load_seconds"] = time.perf_counter() - begin
    transformer, meter = trainer.adapter.pipeline.transformer, meters.Meter()
    content["lora"] = meters.lora_report({name: p for name, p in transformer.named_parameters() if p.requires_grad})
    meter.count(transformer.proj_out, lambda: meter.outermost)
    for owner, method, name in (
        (trainer, "sample", "rollout"),
        (trainer, "prepare_feedback", "reward"),
        (trainer, "optimize", "update"),
        (trainer, "_maybe_offload_samples_to_cpu", "offload"),
        (trainer.adapter, "decode_latents", "decode"),
    ):
        meter.wrap(owner, method, name)
    note("loaded")
    iterations(content, trainer, meter, job, options, note)


def iterations(
    content: dict[str, Any],
    trainer: Any,
    meter: meters.Meter,
    job: Job,
    options: Mapping[str, Any],
    note: Callable[[str], None],
) -> None:
    """Whole epochs of its trainer."""
    logged: dict[str, Any] = {}
    log_data = trainer.log_data
    trainer.log_data = lambda data, step: (logged.update(data), log_data(data, step=step))[1]

    def iterate(part: Job) -> dict[str, Any]:
        reshape(trainer, part)
        logged.clear()
        meter.take()
        begin = time.perf_counter()
        trainer.training_args.max_epochs = trainer.epoch + 1
        trainer.start()
        meters.sync()
        total, figures = time.perf_counter() - begin, meter.take()
        figures["seconds"]["other"] = total - sum(figures["seconds"].values())
        reward = next((float(v) for k, v in logged.items() if "reward" in k and k.endswith("_mean")), None)
        ratios = [float(logged[name]) for name in ("train/ratio_min", "train/ratio_max")]
        return {
            **figures,
            "part": dataclasses.asdict(part),
            "first_log_ratio": max(abs(ratio - 1) for ratio in ratios),
            "gradient_norm": float(logged.get("train/grad_norm", float("nan"))),
            "reward": reward,
        }

    meters.measure_iterations(content, job, options, note, iterate)


def configuration(values: dict[str, Any], job: Job, folder: Path, work: Path) -> dict[str, Any]:
    """The example with the job's numbers; what is not named here is the peer's default."""
    (work / "data").mkdir(parents=True, exist_ok=True)
    (work / "data" / "train.txt").write_text(PROMPT + "\n")
    values |= {"config_file": None, "num_processes": 1, "mixed_precision": "bf16"}
    # One prompt: sixteen workers would only start and stop.
    values["data"] |= {"dataset_dir": str(work / "data"), "cache_dir": str(work / "cache"), "dataloader_num_workers": 0}
    values["model"] |= {
        "model_name_or_path": str(folder),
        "model_type": "wan2_t2v",
        "finetune_type": "lora",
        "lora_rank": job.rank,
        "lora_alpha": job.rank,
        "target_modules": "default",
    }
    values["log"] |= {
        "run_name": "peer",
        "logging_backend": "none",
        "save_dir": str(work / "saves"),
        "save_freq": 0,
        "verbose": False,
    }
    values["train"] |= {
        "kl_beta": 0,
        "resolution": [job.height, job.width],
        "num_frames": job.frames,
        "num_inference_steps": job.steps,
        "guidance_scale": job.guidance,
        "per_device_batch_size": 1,
        "group_size": job.group,
        "unique_sample_num_per_epoch": 1,
        "gradient_step_per_epoch": 1,
        "ema_decay": 0,
        "enable_gradient_checkpointing": True,
        "max_epochs": 0,
    }
    if not meters.CUDA:  # autocast in bfloat16 does not stack its default, float16, on a CPU
        values["train"]["latent_storage_dtype"] = "bf16"
    trained = list(range(job.first, job.first + job.trained))
    values["scheduler"] |= {
        "dynamics_type": "Flow-SDE",
        "noise_level": job.eta,
        "sde_steps": trained,
        "num_sde_steps": len(trained),
    }
    values["eval"] |= {"eval_freq": 0}
    values["rewards"] = [
        {"name": "brightness", "reward_model": "peer_reward.Brightness", "weight": 1.0, "batch_size": 4}
    ]
    return values


def reshape(trainer: Any, part: Job) -> None:
    """Give the next epoch another number of clips and steps, by the fields in which the configuration's arrive."""
    trained = list(range(part.first, part.first + part.trained))
    trainer.training_args.num_inference_steps = part.steps
    trainer.training_args.num_batches_per_epoch = part.group
    for owner in (trainer.training_args, trainer.reward_buffer, trainer.advantage_processor):
        owner.group_size = part.group
    scheduler = trainer.adapter.scheduler
    scheduler._sde_steps, scheduler._num_sde_steps = torch.tensor(trained, dtype=torch.int64), len(trained)
    trainer.accelerator.gradient_accumulation_steps = part.group * len(trained)
    trainer.accelerator.step = 0
