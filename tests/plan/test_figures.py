"""Every figure of a plan, option by option, as they were when a formula was last changed on purpose.

That the formulas are right is measured (test_forecast.py), within what measurements allow; here no figure changes that nobody meant to
change. After a change of a formula: python tests/plan/test_figures.py
"""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from sage_grpo.distributed.spec import RaySpec
from sage_grpo.models.spec import LoraSpec
from sage_grpo.plan import hardware, show
from sage_grpo.plan.architecture import find_architecture
from sage_grpo.plan.changes import _edits, _typed, changes, outcome, over_memory, way_to_fit
from sage_grpo.plan.costs import Forecast, forecast, worker_costs
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec

FILE = Path(__file__).with_name("figures.json")
STATISTICS = RewardSpec(name="video_stats", weights={"sharpness": 1.0})
BASES: dict[str, tuple[str, str, int]] = {
    # recipe, GPU, number of them
    "wan": ("wan/sage", "h200", 1),
    "wan on 8": ("wan/sage", "h200", 8),
    "wan on two nodes": ("wan/sage", "h100", 16),
    "all weights": ("hunyuan15/sage", "h200", 4),
    "branching": ("hunyuan15_lora/branch", "h200", 1),
    "the reward's gradient": ("hunyuan15_lora/draft", "h200", 1),
    "an old policy": ("wan/nft", "h200", 1),
    "two experts": ("wan22/branch", "h200", 8),
    "sound": ("ltx2/branch", "b200", 1),
    "a processor": ("shapes/sage", "cpu", 1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "wan": {
        "batch.micro_batch": 2, "batch.group_size": 6, "model.dtype": "float32", "model.vae_dtype": "float32", "model.vae_tiling": True,
        "model.compile": False, "model.deterministic": True, "model.lora": None, "model.guidance_in_training": False, "model.memory": 9.0,
        "model.negative_gradient": False, "update.gradient_checkpointing": "attention", "update.updates_per_rollout": 3,
        "update.step_fraction": 0.3, "rollout.offload": True, "rollout.storage": "float32", "rollout.steps": 9, "anchor.offload": True,
        "anchor.every": 7, "trust_region.mode": "none", "optimizer.ema": 0.9, "optimizer.max_kl": 1.0, "optimizer.target_kl": 0.1,
        "optimizer.kind": "muon", "evaluate.per_prompt": 3, "evaluate.every": 50, "iterations": 33, "model.lora.rank": 7,
        "rewards": [STATISTICS],
        "rollout.ray": RaySpec(workers=3),
    },
    "branching": {"batch.prompts": 7},
    "wan on 8": {
        "parallel.sp": 2, "parallel.dp_replicate": 2, "parallel.reshard": False, "parallel.cpu_offload": True,
        "parallel.sync_every_pass": True, "model.lora": None, "batch.micro_batch": 3,
    },
    "all weights": {"model.compile": False, "update.gradient_checkpointing": True, "parallel.sp": 4, "parallel.reshard": False},
    "the reward's gradient": {
        "model.vae_tiling": True, "model.vae_dtype": "float32", "rewards": [STATISTICS],
    },
    "an old policy": {"objective.levels": 6, "trust_region.mode": "stepwise"},
    "a processor": {"model.lora": LoraSpec(rank=3)},
}  # fmt: skip


def edited(part: Any, name: str, value: Any) -> Any:
    first, _, rest = name.partition(".")
    return replace(part, **{first: edited(getattr(part, first), rest, value) if rest else value})


@cache
def base(name: str) -> Forecast:
    known, gpu, gpus = BASES[name]
    with mock.patch("torch.get_num_threads", return_value=1):
        place = hardware.find(gpu, gpus)
    place = replace(place, gib=16.0) if place.is_cpu else place
    config = recipe(known)
    if config.data.held_out is None:
        config = edited(config, "data.eval_prompts", "held_out.txt")
    return forecast(config, place, gpus=gpus, held_out=10)


def changed(name: str, option: str) -> Forecast:
    """The forecast of a base with one option; the model without weights is the same."""
    now, value = base(name), OPTIONS[name][option]
    config = now.config
    if option.startswith("rollout.ray"):
        config = replace(config, rollout=replace(config.rollout, on="ray"))
    config = edited(config, option, value)
    architecture = find_architecture(config.model) if option == "model.vae_dtype" else now.architecture
    return forecast(config, now.hardware, gpus=now.layout.processes, architecture=architecture, held_out=10)


def figures(said: Forecast) -> dict[str, Any]:
    def short(*numbers: float) -> list[float]:
        return [float(f"{number:.7g}") for number in numbers]

    crew, idle = worker_costs(said, base("branching")), show.arithmetic(said).get("idle", "")
    return {
        **{one.name: short(one.seconds, *(size / 2**20 for size in dataclasses.astuple(one.memory))) for one in said.phases},
        "run": [*short(said.iteration_seconds, said.evaluation_seconds, said.gpu_hours, said.room / 2**30), said.fits],
        "evaluation": [[one.velocities, one.forwards, one.clips] for one in said.evaluation[:1]],
        "passes": [[[one.velocities, one.forwards, one.clips] for one in row.values()] for row in said.passes[:: said.layout.data]],
        **({} if crew is None else {"crew": [value if isinstance(value, str) else short(value)[0] for value in crew.values()]}),
        **({"idle": idle} if idle else {}),
    }  # fmt: skip


def whole(name: str) -> dict[str, Any]:
    return figures(base(name)) | {"network": rounded(dataclasses.asdict(base(name).network))}


def advice() -> dict[str, Any]:
    """What makes a run faster, and what it takes on smaller cards. (Where it does not fit: see `printed`.)"""
    return {
        "faster": [[one.option, one.run, *figures(one.after)["run"]] for one in changes(base("a processor"))],
        "over memory": [[one.gib, outcome(one), *figures(one)["run"]] for one in over_memory(base("branching"))],
    }


def printed(name: str, option: str) -> dict[str, Any]:
    said = changed(name, option) if option else base(name)
    other = base("branching")
    workers = replace(other, config=said.config, known=other.architecture) if option.startswith("rollout.ray") else said
    found, way, page = changes(said), way_to_fit(said, 2), io.StringIO()
    show.show(said, found, way, Console(width=200, file=page), workers)
    tried = [" ".join(_typed(key, value) for key, value in edit.items()) for edit in _edits(said.config, said)]
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    return {
        "page": lines,
        "short": show.short(said, way),
        "tried": tried,
        "programs": rounded(show.document(said, found[:2], way, workers)),
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def every() -> dict[str, dict[str, Any]]:
    found = {name: whole(name) for name in BASES} | {"advice": advice()}
    found |= {f"{name}, {option}": figures(changed(name, option)) for name, option in CASES if option}
    return found | {f"printed: {name}, {option}": printed(name, option) for name, option in PRINTED}


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text())


CASES = [(name, "") for name in BASES] + [(name, option) for name, options in OPTIONS.items() for option in options]
HEAVY = ("two experts", "sound")
PRINTED = [
    ("wan", "model.memory"), ("wan", "rollout.ray"), ("wan on 8", "batch.micro_batch"),
    ("an old policy", ""), ("a processor", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "option"), [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in HEAVY)) for case in CASES]
)
def test_no_figure_changes_that_nobody_meant_to_change(name: str, option: str, known) -> None:
    if not option:
        check(whole(name), known[name], name)
        return
    found = figures(changed(name, option))
    check(found, known[f"{name}, {option}"], option)
    assert found != known[name], option


def test_advice_changes_where_that_is_meant(known) -> None:
    found = advice()
    assert found.keys() == known["advice"].keys()
    for name, rows in known["advice"].items():
        for row, wanted in zip(found[name], rows, strict=True):
            check({name: row}, {name: wanted}, name)


@pytest.mark.parametrize(("name", "option"), PRINTED)
def test_what_is_printed_are_these_figures(name: str, option: str, known) -> None:
    assert printed(name, option) == known[f"printed: {name}, {option}"]


def check(found: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    assert found.keys() == wanted.keys(), where
    for part, numbers in wanted.items():
        if part not in ("idle", "passes", "evaluation", "network"):
            numbers = [n if isinstance(n, str) else pytest.approx(n, rel=1e-6) for n in numbers]
        assert found[part] == numbers, (where, part)


if __name__ == "__main__":
    rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in every().items())
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
