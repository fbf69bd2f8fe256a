"""Checks of a run that need no weights, before any are loaded or downloaded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sage_grpo.callbacks.metrics import find_sink
from sage_grpo.data.prompts import Prompt, too_few
from sage_grpo.data.sources import HUB
from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import detect_family, resolve
from sage_grpo.models.checkpoints.files import check_lengths
from sage_grpo.models.devices import choose_device, slow_dtype
from sage_grpo.models.spec import ModelSpec, find_family
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.member import without_gradient
from sage_grpo.rewards.spec import BUILT_IN, Need, RewardSpec, find_reward, has_gradient, reward_needs
from sage_grpo.run.identity import stable
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import MOVED, NAMES, Overrides, compiles, load_sources
from sage_grpo.training.planner import Planner
from sage_grpo.types import DifferentiableReward, Reward
from sage_grpo.utils.imports import refuse_object
from sage_grpo.utils.suggest import did_you_mean
from sage_grpo.workers import ray_pool

NOT_EVALUATED = (
    "There are no held-out prompts, so nothing is evaluated: no eval/total, no best weights, no comparison with the base model. "
    "--data.eval_prompts FILE names some that are not trained on."
)


def preflight(config: TrainConfig, ranks: int = 1, given: Overrides | None = None) -> list[str]:
    """Check the plan, the device and the files of a run; a ValueError or FileNotFoundError has the remedy. Returns
    remarks on likely mistakes. Objects in `given` are not checked.

    Checks that need the model (its own noise levels, and those of its trained expert) run again once it is loaded.
    """
    given = given or Overrides()
    objects = ["model"] * (given.model is not None) + [f"reward {name}" for name in given.rewards]
    ray_pool.check(config, ranks, objects)
    check_plan(config, ranks)
    device = choose_device(config.model.device)
    if given.model is None:
        compiles(config, device)
    config.model.check_budget((device if given.model is None else given.model.device).type)
    named = [source.path for source in config.data.sources] if given.prompts is None else []
    for source in (*named, config.data.eval_prompts if given.held_out is None else None):
        refuse_object(source, "its prompts", "Give a file (--data.prompts, --data.eval_prompts)")
    check_files(config, given)
    prompts, held_out = load_sources(config, given)  # prompts that cannot be read
    if given.model is None:
        check_model(config.model)
    check_code(config, given)
    config.check_objective()  # one of your own is not checked with the configuration
    objective = config.build_objective()
    if objective.differentiates:
        check_gradients(config.rewards, given.rewards)
    few = too_few(config.evaluate.prompts, len(held_out)) if held_out else ""
    unmeasured = "" if held_out or not config.rewards else NOT_EVALUATED
    slow = "" if given.model is not None else slow_dtype(config.model.dtype, device)
    remarks = [
        slow,
        *prompt_remarks(prompts, held_out),
        *objective.remarks(config.update.updates_per_rollout),
        few,
        unmeasured,
    ]
    return [text for text in remarks if text]


def prompt_remarks(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[str]:
    trained = set(map(_meaning, prompts))
    seen = sum(_meaning(prompt) in trained for prompt in held_out)
    found = []
    if seen:
        found.append(
            f"{seen} of {len(held_out)} held-out prompts are trained on as well: their scores say little about prompts that the model "
            "has not seen. Keep data.eval_prompts apart from data.prompts."
        )
    for kind, rows in (("training", prompts), ("held-out", held_out)):
        often = Counter((_meaning(one), one.seed, one.rewards, stable(dict(one.metadata))) for one in rows)
        copies = len(rows) - len(often)
        if copies:
            most, times = often.most_common(1)[0]
            text = most[0][0]
            found.append(
                f"{copies} of {len(rows)} {kind} prompts are copies of another ({text[:60]!r} occurs {times} times): every copy "
                "counts. Remove the copies, unless you want that."
            )
    return found


def _meaning(prompt: Prompt) -> tuple[str, tuple[Path, ...]]:
    """Key of a prompt that ignores blanks and capitals."""
    return " ".join(prompt.text.split()).casefold(), tuple(file.resolve() for file in prompt.files)


def check_model(model: ModelSpec) -> None:
    """Check that a local checkpoint is complete and of a known family; one on the hub is downloaded later."""
    place = None if model.path in (None, "shapes") else Path(str(model.path)).expanduser()
    if place is not None and place.exists() and not place.is_dir():
        raise ModelError(
            f'model.path "{model.path}" is a file: give the folder of a diffusers checkpoint (model_index.json).'
        )
    here = place is None or place.is_dir()
    if model.family is None and here:
        detect_family(model)
    if here and model.own_family is None:  # other families know their own files
        check_lengths(resolve(model))


def check_code(config: TrainConfig, given: Overrides) -> None:
    """Check rewards, sinks and model families with an import path; built-in rewards are slow to import."""
    for path in config.log.sinks:
        find_sink(path)
    if given.model is None and config.model.own_family is not None:
        find_family(config.model.own_family)
    for spec in config.rewards:
        if spec.device:
            choose_device(spec.device)
        if spec.name not in BUILT_IN and spec.name not in given.rewards:
            find_reward(spec)


def check_gradients(specs: Sequence[RewardSpec], objects: Mapping[str, Reward]) -> None:
    for spec in specs:
        there = objects.get(spec.name)
        able = has_gradient(spec) if there is None else isinstance(there, DifferentiableReward)
        if spec.counts and not able:
            raise RewardConfigError(without_gradient(spec))


def check_plan(config: TrainConfig, ranks: int = 1) -> Planner:
    """Check windows, steps and updates on an even grid, and rollouts against ranks."""
    grid = Schedule.shifted(config.rollout.steps, 1.0)
    kernel = config.kernel.build(grid)
    asked = config.rollout.deterministic_last
    # The noise limit of steps near the end depends on the model's grid, which is not known yet.
    last = kernel.leaves_noise if asked is None else asked
    planned = replace(config, rollout=replace(config.rollout, deterministic_last=last))
    planner = Planner(planned, grid, kernel, trains=lambda sigma: True, ranks=ranks)
    planner.check()
    return planner


def check_files(config: TrainConfig, given: Overrides | None = None) -> None:
    """Refuse missing files, all in one message with the origin of each."""
    given = given or Overrides()
    objects = {
        "data.prompts": given.prompts,
        "data.eval_prompts": given.held_out,
        "model.path": given.model,
        "model.lora.path": given.model,
    }
    absent = [need for need in needs(config) if objects.get(need.key) is None and not need.is_here]
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    fetched = [need for need in absent if need.is_hub_id and not offline]
    missing = [need for need in absent if need not in fetched]
    if not missing:
        return
    lines = [f"  {need.key} {need.value}\n      {need.source}" for need in missing]
    lines += [f"Would be downloaded from the hub: {', '.join(need.value for need in fetched)}."] if fetched else []
    many = f"{len(missing)} files or folders are" if len(missing) > 1 else "A file or folder is"
    raise FileNotFoundError(f"{many} missing:\n" + "\n".join(lines))


def needs(config: TrainConfig) -> Iterator[Need]:
    """Every file that a configuration names."""
    data, model = config.data, config.model
    form = "one a line in a .txt, or a .csv, .json, .jsonl or .parquet with a column prompt"
    if data.clips is not None:
        yield Need(
            "data.clips", data.clips, "your clips: a .jsonl or .csv with prompt, win and lose, or prompt and clip"
        )
    else:
        for path in (one.path for one in data.sources if one.path not in NAMES and not one.path.startswith(HUB)):
            source = f"your training prompts: {form}; --data.prompts FILE, or starter.{_hint(path)}"
            yield Need("data.prompts", path, source)
    held_out = str(data.held_out)
    if data.held_out not in (None, *NAMES) and not held_out.startswith(HUB):
        source = (
            f"your held-out prompts: {form}; --data.eval_prompts FILE, or null to evaluate nothing.{_hint(held_out)}"
        )
        yield Need("data.eval_prompts", held_out, source)
    if model.path not in (None, "shapes"):
        source = "a diffusers checkpoint: a folder, or a hub name (hf download NAME fetches it)"
        yield Need("model.path", str(model.path), source, hub="model_index.json")
    if model.lora is not None and model.lora.path is not None:
        yield Need(
            "model.lora.path",
            model.lora.path,
            "a saved LoRA to start from: a folder, or owner/name@COMMIT on the hub; null starts at zero",
            hub="pytorch_lora_weights.safetensors",
            pinned=True,
        )
    for spec in config.rewards:
        yield from reward_needs(spec)


def _hint(prompts: str) -> str:
    moved = f" {prompts!r} is {MOVED[prompts]} of the project's repository." if prompts in MOVED else ""
    return did_you_mean(prompts, NAMES) or moved
