"""A parser's error as one line: the fault, the value, the nearest valid name, and the remedy."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sage_grpo.config.ranges import KINDS, inner_dataclass
from sage_grpo.utils.suggest import did_you_mean, nearest
from sage_grpo.version import ROOT

ALSO_CALLED = {
    "batch.group_size": ("num_generations", "generations", "samples_per_prompt", "num_samples", "group"),
    "batch.micro_batch": ("micro_batch_size", "per_device_train_batch_size", "mbs"),
    "batch.prompts": ("batch_size", "train_batch_size", "prompts_per_iteration"),
    "data.eval_prompts": ("val_prompts", "test_prompts", "held_out", "eval_data"),
    "data.prompts": ("dataset", "prompt_file", "prompt_path", "train_prompts", "prompts"),
    "evaluate.every": ("eval_every", "eval_freq", "eval_steps"),
    "iterations": ("num_iterations", "max_steps", "max_train_steps", "num_steps", "epochs", "num_epochs"),
    "keep.checkpoint_every": ("save_every", "save_steps", "save_freq", "checkpointing_steps"),
    "kernel.eta": ("noise_level", "noise_scale"),
    "kernel.name": ("sampler", "sde", "sde_type"),
    "kl.lambda_max": ("kl_weight", "kl_beta", "kl_coef", "kl_lambda"),
    "log.wandb": ("wandb_project", "report_to"),
    "model.dtype": ("precision", "mixed_precision", "torch_dtype", "weight_dtype"),
    "model.frames": ("num_frames", "video_length"),
    "model.guidance_scale": ("cfg", "cfg_scale", "guidance", "embedded_guidance_scale"),
    "model.lora.rank": ("lora_rank", "lora_r"),
    "model.path": ("model_path", "model_name", "pretrained", "pretrained_model_name_or_path", "ckpt"),
    "optimizer.lr": ("learning_rate", "learningrate", "step_size"),
    "optimizer.max_grad_norm": ("grad_clip", "gradient_clip", "clip_grad_norm", "clip_grad"),
    "optimizer.warmup_updates": ("warmup", "warmup_steps", "lr_warmup_steps"),
    "out": ("output", "output_dir", "out_dir", "outdir", "save_dir", "logdir"),
    "rewards": ("reward", "reward_fn", "reward_funcs", "reward_model"),
    "rollout.steps": ("num_inference_steps", "sampling_steps", "denoising_steps", "inference_steps"),
    "surrogate.clip_range": ("clip_eps", "epsilon", "cliprange"),
    "model.deterministic": ("full_determinism", "use_deterministic_algorithms", "reproducible"),
    "update.gradient_checkpointing": ("grad_checkpointing", "activation_checkpointing"),
    "steps": ("num_inference_steps", "sampling_steps"),
    "prompts": ("prompt", "text"),
}
"""Names of options in other programs; only those that are not near enough in letters."""


def nearest_key(given: str, keys: Sequence[str]) -> str:
    """The nearest whole key, else the key of another program's name, else the nearest by its last part (people forget the prefix)."""
    given = given.lower().replace("-", "_")
    if near := nearest(given, keys, 0.8):
        return near
    tail = given.rsplit(".", 1)[-1]
    for key in keys:
        if tail in ALSO_CALLED.get(key, ()):
            return key
    tails = {key.rsplit(".", 1)[-1]: key for key in reversed(keys)}
    return nearest(given, keys, 0.75) or tails.get(nearest(tail, tails), "")


def recipe_hint(name: str, targets: Collection[str]) -> str:
    """Advice for a model family in place of one of a recipe's `targets`, or ""."""
    families = [file.stem for file in (ROOT / "models" / "families").glob("[a-z]*.py")]
    family = nearest(name.split("/")[0], [*families, *targets], 0.8)
    if not family or family in targets:
        return ""
    return (
        f" {family} is a family of models without a recipe of its own; another recipe trains it: sage-grpo train wan/branch --model.path MODEL "
        "--rewards FILE. An image is a clip of one frame, for rewards of single frames (docs/image-models.md)."
    )


def explain(message: str, options: type) -> str:
    """A parser's message in one line, with the nearest valid key or value."""
    kinds = dict(leaves(options))
    items = {key: get_args(kind)[0] for key, kind in kinds.items() if lists_parts(kind)}
    keys = [*kinds, *(f"{key}.{inner}" for key, item in items.items() for inner, _ in leaves(item))]
    place = ""
    for part in re.findall(r'Parser key "([\w.\[\]]+)"', message):  # of a group, then of a key in it
        place = f"{place}.{part}" if place and not part.startswith(place) else part
    if group := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        return _no_option(f"{group[1]}.{group[2]}", keys)
    if option := re.search(r"Option '([\w.+-]+)' is not accepted", message):
        return _no_option(f"{place}.{option[1]}" if place else option[1], keys)
    if words := re.search(r"unrecognized arguments?: (.+)", message):
        if stray := re.search(r"--([\w.+-]+)", words[1]):
            return _no_option(stray[1], keys)
        word = words[1].split()[0]
        run = f" Did you mean --run {word}?" if "run" in keys and os.path.isfile(f"{word}/config.yaml") else ""
        return f"{word!r} belongs to no option: options are written --name value, lists --name [a, b].{run}"
    if missing := re.search(r"following arguments are required: (.+)", message):
        needed = []
        for name in map(str.strip, missing[1].split(",")):
            choices = get_args(kinds.get(name)) if get_origin(kinds.get(name)) is Literal else ()
            needed.append(f"--{name} is needed" + (f": one of {', '.join(choices)}." if choices else "."))
        return " ".join(needed)
    wrong = _wrong_value(message, place)
    if place in items and "must be a list" in wrong:
        first = dataclasses.fields(items[place])[0].name
        return f"{wrong} Each is a mapping: --{place} '[{{\"{first}\": ...}}]'."
    return wrong or " ".join(message.split())


def lists_parts(kind: Any) -> bool:
    return get_origin(kind) is list and dataclasses.is_dataclass(*get_args(kind))


def _no_option(name: str, keys: Sequence[str]) -> str:
    near = nearest_key(name, keys)
    return f"There is no option {name!r}." + (f" Did you mean {near!r}?" if near else " --help lists all.")


def _wrong_value(message: str, place: str) -> str:
    file = re.search(r"(?:File does not exist|Path is not a file|.*not readable): '(.+)'", message)
    if place == "config" and file:
        return f"--config {file[1]}: there is no such file to read."
    if alone := re.search(r"argument (--[\w.]+): expected one argument", message):
        return f"{alone[1]} needs a value."
    if not place:
        return ""
    got = re.search(r"(?:Got value|Given value): (.+)", message)
    value = got[1].strip() if got else ""
    if literal := re.search(r"Expected a (?:typing\.)?Literal\[(.+?)\]", message):
        choices = [choice.strip(" '\"") for choice in literal[1].split(",")]
        return f"{place} must be one of {', '.join(choices)}, got {value!r}.{did_you_mean(value, choices, 0.5)}"
    kinds = [KINDS[kind] for kind in re.findall(r"Expected a <class '(\w+)'>", message) if kind in KINDS]
    if kinds:
        return f"{place} must be {' or '.join(dict.fromkeys(kinds))}, got {value!r}."
    if load := re.search(r"Unable to load config ['\"](.+?)['\"]", message):
        return f"{place} is a group of options: --{place}.NAME value or {{NAME: value}}; got {load[1]!r}."
    return ""


def groups(options: type) -> list[str]:
    """The dotted keys that are groups of others."""
    return [key for key, kind in leaves(options) if inner_dataclass(kind) and not lists_parts(kind)]


@cache
def leaves(options: type, prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """Every dotted key of an options dataclass with its type."""
    hints, keys = get_type_hints(options), []
    for field in dataclasses.fields(options):
        key, kind = prefix + field.name, hints[field.name]
        keys.append((key, kind))
        if inner_dataclass(kind) and not lists_parts(kind):
            keys += leaves(inner_dataclass(kind), f"{key}.")
    return tuple(keys)
