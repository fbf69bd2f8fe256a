"""List rewards with their requirements (files, extras, GPU memory, license), and which are ready on this machine.

`sage-grpo rewards` lists all; `sage-grpo rewards RECIPE` (or FILE.yaml, or a run's folder) lists those of a configuration, with exit
status 1 if something is missing. Nothing is loaded, downloaded or sent.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from sage_grpo.rewards.spec import BUILT_IN, RewardSpec, facts_of, needed_options, readiness
from sage_grpo.utils.text import fixed


@dataclass(frozen=True, kw_only=True)
class Options:
    """Rewards to list, and the output."""

    of: str | None = None
    """A recipe, YAML file or run folder whose rewards to list; None lists all."""
    json: bool = False
    """Print JSON only."""


def run(options: Options) -> int:
    """List; the exit status is 1 where a reward of the configuration is not ready."""
    if options.of is None:
        rows = [_entry(name) for name in BUILT_IN]
    else:
        rows = [_entry(spec.name, spec) for spec in configured(options.of)]
    if options.json:
        print(json.dumps({"gpu": _gpu(), "rewards": rows}, indent=2, allow_nan=False))
    else:
        _show(rows, options.of)
    return 0 if options.of is None or all(row["ready"] for row in rows) else 1


def configured(name: str) -> list[RewardSpec]:
    """The rewards of a recipe, of a YAML file for `train`, or of a run's folder."""
    from sage_grpo.cli.starting import from_recipe
    from sage_grpo.config.parsing import parse
    from sage_grpo.training.config import TrainConfig

    start, words = from_recipe(TrainConfig, ["--recipe", name], runs=True)
    return list(parse(TrainConfig, words, prog="sage-grpo rewards", defaults=start, recipes=True).rewards)


def _entry(name: str, spec: RewardSpec | None = None) -> dict[str, Any]:
    """One reward as plain data, without the values of its options, which may be anything."""
    facts = facts_of(name)
    about: dict[str, Any] = {"what": "your own", "parts": ", ".join(spec.weights if spec is not None else ())}
    if facts is not None:
        about = {**asdict(facts), "files": {key: file.text.format(value="FOLDER") for key, file in facts.files.items()}}
    state = readiness(spec or RewardSpec(name=name))
    gpu, memory = _gpu(), about.get("gigabytes", 0.0)
    tight = (
        f"; {memory:g} GB of weights, the GPU has {fixed(gpu['gigabytes'], 1)}"
        if gpu and memory > gpu["gigabytes"]
        else ""
    )
    found = {
        "name": name,
        **({"label": spec.title, "weights": dict(spec.weights)} if spec is not None else {}),
        "files": {},
        **about,
        "needed_options": [] if facts is None else needed_options(name),
        "ready": state.ready,
        "state": state.describe() + tight,
    }
    if spec is not None:
        found |= {"missing": list(state.missing), "downloads": list(state.downloads)}
    return found


def _gpu() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    return {"name": facts.name, "gigabytes": facts.total_memory / 1e9}


FACTS = (
    ("memory ", "gigabytes", "about {:g} GB for the weights"),
    ("install", "extra", 'pip install "sage-grpo[{}]"'),
    ("network", "network", "{}"),
    ("license", "licence", "{}"),
)


def _show(rows: list[dict[str, Any]], of: str | None) -> None:
    gpu = _gpu()
    print("GPU: none" if gpu is None else f"GPU: {gpu['name']}, {fixed(gpu['gigabytes'], 1)} GB")
    print(f"Rewards of {of}:" if of else "Rewards (`sage-grpo rewards RECIPE` checks those of a configuration):")
    for row in rows:
        title = row["name"] if row.get("label", row["name"]) == row["name"] else f"{row['name']} ({row['label']})"
        print(f"\n{title}: {row['what']}")
        print(f"  returns   {row['parts']}")
        for option, source in row["files"].items():
            needed = "" if option in row["needed_options"] else " (optional)"
            print(f"  option    {option}{needed}: {source}")
        others = [option for option in row["needed_options"] if option not in row["files"]]
        if others:
            print(f"  option    {', '.join(others)}")
        for label, key, text in FACTS:
            if row.get(key):
                print(f"  {label}   {text.format(row[key])}")
        print(f"  here      {row['state']}")
