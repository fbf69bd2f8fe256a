"""Identity of a run: its settings, and fingerprints of the prompts, weights and code that they name.

A checkpoint stores it. Resuming with another identity would mix two runs, so each such change is refused unless
`allow_changes` names it. Fields that do not affect results (place, length, speed, logging) may change.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sage_grpo.config.errors import leaves
from sage_grpo.config.metadata import MEANING, affects
from sage_grpo.config.parsing import ConfigError
from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed import checkpoint
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.checkpoints.cache import digest
from sage_grpo.models.checkpoints.checkpoint import fingerprint, read_index, resolve
from sage_grpo.models.lora import find_adapter
from sage_grpo.models.spec import ModelSpec
from sage_grpo.rewards.functions import FunctionReward
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import Overrides
from sage_grpo.utils.imports import PREFIX
from sage_grpo.utils.suggest import did_you_mean
from sage_grpo.version import ROOT, __version__

CONTENT = {
    "prompts": "the content of data.prompts, or of data.clips",
    "eval_prompts": "the content of data.eval_prompts",
    "weights": "the base model's files, or the frozen weights of a model object",
    "code": "the package's code",
    "plugins": "the code of rewards or of a model of your own",
}
"""Content with a fingerprint: its name in `allow_changes` and its description."""
OUTSIDE = ("cli", "recipes", "tools", "api.py", "__init__.py", "__main__.py")
"""Parts of the package that a run does not compute with."""
SAMPLE = 1024  # numbers of a frozen tensor that its fingerprint includes
LIBRARIES = ("builtins", "abc", "typing", "torch", "sage_grpo")  # not user code
FINISHED = ".finished"
"""File with the iteration of the weights in final/; written last, so that a run that was killed before does not count
as finished."""


def identify(
    config: TrainConfig, sources: Sequence[Sequence[Prompt]], given: Overrides | None = None
) -> dict[str, str]:
    """Fingerprints of all content that the configuration only names, or of a program's objects; `sources` are its prompts."""
    given, (prompts, held_out) = given or Overrides(), sources
    return {
        "prompts": _of_prompts(prompts),
        "eval_prompts": _of_prompts(held_out),
        "weights": of_checkpoint(config.model) if given.model is None else of_weights(given.model),
        "code": of_code(),
        "plugins": _of_plugins(config, given),
    }


def unsure(given: Overrides) -> list[str]:
    names = [name.removeprefix(PREFIX) for name, one in given.rewards.items() if not hasattr(one, "fingerprint")]
    text = (
        f"The code of {', '.join(names)} is that of the run so far; whether what it holds or refers to (weights, settings, globals) is unchanged "
        "cannot be checked. A method fingerprint() makes it checkable."
    )
    return [text] if names else []


def check(config: TrainConfig, identity: Mapping[str, str], meta: Mapping[str, Any], out: Path) -> list[str]:
    """Refuse to resume a run with another identity; returns the harmless changes."""
    changed = differences(meta["config"], plain(dataclasses.asdict(config)))
    free = [key for key in changed if affects(TrainConfig, key) not in MEANING]
    known = meta.get("identity")
    known = known if isinstance(known, dict) else {}
    refused = {key: f"{old!r} -> {new!r}" for key, (old, new) in changed.items() if key not in free}
    # An earlier version's fingerprint may be a prefix of today's.
    refused |= {
        name: what for name, what in CONTENT.items() if not f"{identity[name]}/".startswith(f"{known.get(name)}/")
    }
    allowed = [key for key in refused if any(f"{key}.".startswith(f"{name}.") for name in config.allow_changes)]
    wrong = [key for key in refused if key not in allowed]
    if wrong:
        short = {key: text if len(text) <= 200 else f"{text[:200]}..." for key, text in refused.items()}
        lines = "".join(f"\n  {key}: {short[key]}" for key in wrong)
        raise ConfigError(
            f"{out} holds a run that differs from this one; to continue it would mix the two:{lines}\n"
            f"Choose another `out`, use the settings of {out / 'config.yaml'}, or ask for the change by name: "
            f"--allow_changes {','.join(wrong)}"
        )
    return [key for key in (*free, *allowed) if affects(TrainConfig, key) != "start"]


def check_names(allow_changes: Iterable[str]) -> None:
    """Refuse names that are neither a field nor content with a fingerprint."""
    known = [*(key for key, _ in leaves(TrainConfig)), *CONTENT]
    for name in allow_changes:
        if name not in known:
            raise ConfigError(
                f"allow_changes: there is no {name!r}. Use fields (optimizer.lr, seed) or {', '.join(CONTENT)}."
                f"{did_you_mean(name, known)}"
            )


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys of different values; a key that one side lacks belongs to another version of the code."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in (one for one in old if one in new):
            found |= differences(old[name], new[name], f"{prefix}{name}.")
        return found
    key = prefix.rstrip(".")
    if key == "rewards":
        old, new = _without_free(old), _without_free(new)
    return {} if old == new else {key: (old, new)}


def plain(value: Any) -> Any:
    """Convert tuples to lists, as in JSON and YAML."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _without_free(rewards: Any) -> Any:
    if not isinstance(rewards, list) or not all(isinstance(reward, dict) for reward in rewards):
        return rewards  # no run writes this, so it counts as a difference
    usual = plain(dataclasses.asdict(RewardSpec(name="")))  # of fields that an earlier version did not know
    known = [name for name in usual if affects(RewardSpec, name) in MEANING]
    return [{name: one.get(name, usual[name]) for name in known} for one in rewards]


def _of_prompts(prompts: Sequence[Prompt]) -> str:
    sha, source = hashlib.sha256(), None
    for prompt in prompts:
        routed = f" rewards {prompt.rewards}" if prompt.rewards else ""
        sha.update(f"{prompt.text!r} {prompt.seed} {stable(dict(prompt.metadata))}{routed}".encode())
        if prompt.source is not None and prompt.source != source:
            sha.update(f" of a source with weight {prompt.source.weight}".encode())
        source = prompt.source
        for file in (*prompt.files, *prompt.clips):
            with file.open("rb") as stream:
                sha.update(f"{file.stat().st_size}/".encode() + stream.read(1 << 16))
    return sha.hexdigest()


def of_checkpoint(spec: ModelSpec) -> str:
    """Fingerprint of a configured model's files: its components, then its index, its format and its frozen adapters."""
    if spec.own_family is not None:
        return of_base(spec)
    folder = resolve(spec)
    experts = read_index(folder).get("boundary_ratio") is not None
    adapters = [fingerprint(find_adapter(one, experts=experts), [one.file]) for one in spec.adapters]
    return f"{of_base(spec)}/{digest(fingerprint(folder, ['model_index.json', 'video.json']), *adapters)}"


def of_base(spec: ModelSpec) -> str:
    if spec.own_family is not None:  # the package does not know its files, so its name counts
        return json.dumps([spec.family, spec.path, spec.revision])
    folder = resolve(spec)
    parts = [name for name in read_index(folder) if (folder / name).is_dir()]
    return fingerprint(folder, parts)


def of_code() -> str:
    """The version and a digest of the source code that a run computes with."""
    root, sha = ROOT, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if name.parts[0] not in OUTSIDE:
            sha.update(name.as_posix().encode() + file.read_bytes())
    return f"{__version__}/{sha.hexdigest()}"


def _of_plugins(config: TrainConfig, given: Overrides) -> str:
    paths = [*(reward.name for reward in config.rewards), config.kernel.name, config.objective.kind]
    names = [path.partition(":")[0] for path in paths if ":" in path]
    names += [] if config.model.own_family is None else [config.model.own_family]
    sha = hashlib.sha256()
    for name in sorted(set(names)):
        file = _source(name)
        sha.update(name.encode() + (b"" if file is None else file.read_bytes()))
    objects: list[tuple[str | None, Any]] = [*given.rewards.items()]
    objects += [] if given.model is None else [(config.model.family, given.model)]
    for called, thing in objects:
        sha.update(f"{called} {of_object(thing)}".encode())
    return sha.hexdigest()


def _source(module: str) -> Path | None:
    """The file of a module, if there is one: the loader has the better error."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None or not Path(spec.origin).is_file() else Path(spec.origin)


def of_object(thing: object) -> str:
    """The object's own `fingerprint()`, the same for equal objects in any process, or a digest of its source, without globals, closures and
    attributes."""
    if hasattr(thing, "fingerprint"):
        return str(thing.fingerprint())
    target = thing.function if isinstance(thing, FunctionReward) else thing
    return hashlib.sha256("\n".join(_source_of(target)).encode()).hexdigest()


def of_weights(model: VelocityModel) -> str:
    """Fingerprint of a model's weights: names and shapes, and samples of frozen tensors (a checkpoint has the others)."""
    sha = hashlib.sha256()
    trained = {id(parameter) for parameter in model.trainable().values()}
    for module in (model.network, *model.others):
        for name, tensor in sorted([*module.named_parameters(), *module.named_buffers()], key=lambda pair: pair[0]):
            sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            if id(tensor) not in trained and tensor.numel():
                flat = tensor.detach().flatten()
                some = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].to("cpu", torch.float64)
                sha.update(some.contiguous().numpy().tobytes())
    return sha.hexdigest()


def stable(value: Any) -> str:
    """A text that is the same in every process; objects that are not plain data count by type only."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{stable(key)}: {stable(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(stable, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(stable, value))) + "}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return f"<{type(value).__qualname__}>"


def _source_of(target: Any) -> Iterator[str]:
    if isinstance(target, functools.partial):
        yield from _source_of(target.func)
        yield stable([target.args, target.keywords])
    elif inspect.isclass(target):
        parents = [kind for kind in target.__mro__ if kind.__module__.partition(".")[0] not in LIBRARIES]
        yield from map(_text, parents)
    elif inspect.isroutine(target):
        yield _text(inspect.unwrap(target))
    else:
        yield from _source_of(type(target))


def _text(code: Any) -> str:
    try:
        return inspect.cleandoc(inspect.getsource(code))
    except (OSError, TypeError):  # typed into an interpreter, or not Python
        made = getattr(code, "__code__", None)
        known = () if made is None else (made.co_code.hex(), stable(made.co_consts), made.co_names)
        return f"{getattr(code, '__qualname__', code)} {known}"


@dataclass(frozen=True)
class FoundRun:
    """State of the run's folder."""

    checkpoint: str
    """Name of the checkpoint to resume from; empty for none."""
    identity: dict[str, str]
    changed: list[str]
    """Harmless or allowed changes since then."""
    notes: list[str]
    finished: int | None
    """The final iteration, if the run is finished."""


def find_run(config: TrainConfig, sources: Sequence[Sequence[Prompt]], given: Overrides, out: Path) -> FoundRun:
    """Inspect the folder and decide whether this run may resume it; refuses before anything heavy is loaded."""
    check_names(config.allow_changes)
    root = out / "checkpoints"
    if config.resume == "never" and root.is_dir() and any(root.iterdir()):
        raise ValueError(
            f"{out} holds checkpoints of another run. Choose another `out`, or resume: auto to continue it."
        )
    notes = checkpoint.recover(root)
    folder = checkpoint.newest_good(root)
    if folder is None and checkpoint.folders(root):
        # Starting anew would overwrite the metrics of a run whose checkpoints may still be repaired.
        raise checkpoint.CheckpointError(
            f"{root} has checkpoints, but every checkpoint there is damaged (see the warnings). Restore one from a copy, or "
            "choose another `out` to start anew."
        )
    if config.resume == "must" and folder is None:
        raise FileNotFoundError(f"resume: must, but {root} holds no usable checkpoint.")
    prints = identify(config, sources, given)
    if folder is None:
        return FoundRun("", prints, [], notes, None)
    meta = checkpoint.read_meta(folder, {"config": dict, "iteration": int})
    changed = check(config, prints, meta, out)
    done, marker = int(meta["iteration"]), out / FINISHED
    exported = (out / "final").is_dir() and marker.is_file() and marker.read_text().strip() == str(done)
    finished = done if done >= config.iterations and exported else None
    return FoundRun(folder.name, prints, changed, notes + unsure(given), finished)
