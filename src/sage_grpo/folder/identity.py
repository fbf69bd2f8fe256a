"""What makes a run this run: its settings, and fingerprints of the prompts, weights and code that they name.

A checkpoint holds them. A run that continues with others would be a mixture of two, so each change of what a run means is
refused unless `allow_changes` names it. Fields that affect something else (where, how long, how fast, what is logged) are free.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_grpo.configure import ConfigError, leaves
from sage_grpo.data.prompts import Prompt
from sage_grpo.effects import MEANING, affects
from sage_grpo.folder.prints import Fingerprinted, of_object, of_weights, stable
from sage_grpo.hints import did_you_mean
from sage_grpo.models.checkpoints.checkpoint import fingerprint, read_index, resolve
from sage_grpo.models.spec import ModelSpec
from sage_grpo.named import PREFIX
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import Given, load_sources
from sage_grpo.version import ROOT, __version__

CONTENT = {
    "prompts": "the content of data.prompts",
    "eval_prompts": "the content of data.eval_prompts",
    "weights": "the base model's files, or the frozen weights of a model object",
    "code": "the package's code",
    "plugins": "the code of rewards or of a model of your own",
}
"""What has a fingerprint: its name in `allow_changes` and what it is."""
OUTSIDE = ("commands", "recipes", "report", "lab", "api.py", "cli.py", "__init__.py", "__main__.py", "inspector.py")
"""Parts of the package that a run does not compute with."""


def identify(config: TrainConfig, own: Given | None = None) -> dict[str, str]:
    """Fingerprints of everything that the configuration only names, and of what a program hands over in its place."""
    own = own or Given()
    prompts, held_out = load_sources(config, own)
    return {
        "prompts": _of_prompts(prompts),
        "eval_prompts": _of_prompts(held_out),
        "weights": of_base(config.model) if own.model is None else of_weights(own.model),
        "code": of_code(),
        "plugins": _of_plugins(config, own),
    }


def unsure(own: Given) -> list[str]:
    """What a continued run cannot know about the objects that it is handed, for people."""
    names = [name.removeprefix(PREFIX) for name, reward in own.rewards.items() if not isinstance(reward, Fingerprinted)]
    if not names:
        return []
    return [
        f"The code of {', '.join(names)} is that of the run so far; whether what it holds or refers to (weights, settings, globals) is, "
        "cannot be told. A method fingerprint() would tell."
    ]


def check(config: TrainConfig, identity: Mapping[str, str], meta: Mapping[str, Any], out: Path) -> list[str]:
    """Refuse to continue a run of another meaning; returns the harmless changes, for people."""
    changed = differences(meta["config"], plain(dataclasses.asdict(config)))
    free = [key for key in changed if affects(TrainConfig, key) not in MEANING]
    known = meta.get("identity")
    known = known if isinstance(known, dict) else {}
    refused = {key: f"{old!r} -> {new!r}" for key, (old, new) in changed.items() if key not in free}
    refused |= {name: what for name, what in CONTENT.items() if known.get(name) != identity[name]}
    allowed = [key for key in refused if _covers(config.allow_changes, key)]
    wrong = [key for key in refused if key not in allowed]
    if wrong:
        lines = "".join(f"\n  {key}: {_short(refused[key])}" for key in wrong)
        raise ConfigError(
            f"{out} holds a run that differs from this one; to continue it would mix the two:{lines}\n"
            f"Choose another `out`, go back to what {out / 'config.yaml'} names, or ask for the change by name: "
            f"--allow_changes {','.join(wrong)}"
        )
    return [key for key in (*free, *allowed) if affects(TrainConfig, key) != "start"]


def check_names(allow_changes: Iterable[str]) -> None:
    """Refuse names that are neither a field nor something with a fingerprint."""
    known = [*(key for key, _ in leaves(TrainConfig)), *CONTENT]
    for name in allow_changes:
        if name not in known:
            raise ConfigError(
                f"allow_changes: there is no {name!r}. Use fields (optimizer.lr, seed) or {', '.join(CONTENT)}."
                f"{did_you_mean(name, known)}"
            )


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys of different values. A key that one side lacks belongs to another version of the code, which is told apart by
    its fingerprint."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {
            key: pair
            for name in old
            if name in new
            for key, pair in differences(old[name], new[name], f"{prefix}{name}.").items()
        }
    key = prefix.rstrip(".")
    if key == "rewards":
        old, new = _without_free(old), _without_free(new)
    return {} if old == new else {key: (old, new)}


def plain(value: Any) -> Any:
    """Tuples as lists, as JSON and YAML have them."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _without_free(rewards: Any) -> Any:
    if not isinstance(rewards, list) or not all(isinstance(reward, dict) for reward in rewards):
        return rewards  # what no run writes is a difference
    return [{key: value for key, value in one.items() if affects(RewardSpec, key) in MEANING} for one in rewards]


def _covers(names: Iterable[str], key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _of_prompts(prompts: Sequence[Prompt]) -> str:
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(f"{prompt.text!r} {prompt.seed} {stable(dict(prompt.metadata))}".encode())
        if prompt.image is not None:
            with prompt.image.open("rb") as stream:
                sha.update(f"{prompt.image.stat().st_size}/".encode() + stream.read(1 << 16))
    return sha.hexdigest()


def of_base(spec: ModelSpec) -> str:
    """The files of the model that a configuration names."""
    if spec.family is not None and "." in spec.family:  # its files are its own affair; what names them counts
        return json.dumps([spec.family, spec.path, spec.revision])
    folder = resolve(spec)
    parts = [name for name in read_index(folder) if (folder / name).is_dir()]
    return fingerprint(folder, parts)


def of_code() -> str:
    """The version and a digest of the source of everything that a run computes with."""
    root, sha = ROOT, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if name.parts[0] not in OUTSIDE:
            sha.update(name.as_posix().encode() + file.read_bytes())
    return f"{__version__}/{sha.hexdigest()}"


def _of_plugins(config: TrainConfig, own: Given) -> str:
    names = [reward.name.partition(":")[0] for reward in config.rewards if ":" in reward.name]
    names += [config.model.family] if config.model.family and "." in config.model.family else []
    names += [config.kernel.name.partition(":")[0]] if ":" in config.kernel.name else []
    sha = hashlib.sha256()
    for name in sorted(set(names)):
        file = _source(name)
        sha.update(name.encode() + (b"" if file is None else file.read_bytes()))
    objects: list[tuple[str | None, Any]] = [*own.rewards.items()]
    objects += [] if own.model is None else [(config.model.family, own.model)]
    for called, thing in objects:
        sha.update(f"{called} {of_object(thing)}".encode())
    return sha.hexdigest()


def _source(module: str) -> Path | None:
    """The file of a module; None where there is none, which the loader explains better."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None or not Path(spec.origin).is_file() else Path(spec.origin)
