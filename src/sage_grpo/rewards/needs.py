"""What a reward needs before its first score, files above all, and whether it is here: so that all that is missing is said at once."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec, facts_of, find_reward


@dataclass(frozen=True)
class Need:
    """Something on disk that an option names."""

    key: str
    """The option, as errors call it."""
    value: str
    source: str
    """Where it comes from."""
    hub: str = ""
    """A file of it by which to find it in the hub's cache; empty where only a path will do."""
    repo: str = ""
    """The repository on the hub that a folder at this path is a copy of."""
    pinned: bool = False
    """Whether a name on the hub needs its commit (owner/name@COMMIT): without one, owner/name is a folder."""

    @property
    def is_hub_id(self) -> bool:
        """Whether the value can be a name on the hub: owner/name, and no path."""
        named = self.value.count("/") == 1 and not self.value.startswith((".", "/", "~"))
        return bool(self.hub) and named and ("@" in self.value or not self.pinned)

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, as a path or in the hub's cache."""
        if Path(self.value).expanduser().exists():
            return True
        if not self.is_hub_id:
            return False
        from huggingface_hub import try_to_load_from_cache

        repo, _, revision = self.value.partition("@")
        return isinstance(try_to_load_from_cache(repo, self.hub, revision=revision or None), str)


def reward_needs(spec: RewardSpec) -> Iterator[Need]:
    """The files that the options of a reward name."""
    facts = facts_of(spec.name)
    for option, file in facts.files.items() if facts is not None else ():
        value = spec.options.get(option)
        if isinstance(value, str) and value:
            key, source = f"rewards {spec.title}: {option}", file.text.format(value=value)
            yield Need(key, value, source, file.hub, file.repo, pinned=bool(file.repo))


@dataclass(frozen=True)
class Readiness:
    """What stands between a reward and its first score."""

    missing: tuple[str, ...] = ()
    """What has to be done first."""
    downloads: tuple[str, ...] = ()
    """What would come from the hub by itself."""
    notes: tuple[str, ...] = ()
    """What could not be looked at."""

    @property
    def ready(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    def describe(self) -> str:
        """In one line."""
        words = [*self.missing, *(f"downloads {name}" for name in self.downloads), *self.notes]
        return "; ".join(words) or "ready"


def needed_options(name: str) -> list[str]:
    """Options of a built-in reward that have no default."""
    parameters = inspect.signature(find_reward(RewardSpec(name=name))).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.KEYWORD_ONLY]


def readiness(spec: RewardSpec) -> Readiness:
    """Whether a reward of a configuration can be loaded here, as far as that shows without loading it."""
    if ":" in spec.name:
        return Readiness(notes=(f"own code ({spec.name}): train and evaluate try it out",))
    facts = facts_of(spec.name)
    if facts is None:
        try:
            find_reward(spec)  # refuses it with the nearest name
        except RewardConfigError as error:
            return Readiness(missing=(str(error),))
        return Readiness(notes=("an object of the Python API",))
    missing = [f"needs the option {name}" for name in needed_options(spec.name) if name not in spec.options]
    if facts.module and importlib.util.find_spec(facts.module) is None:
        missing.append(f'pip install "sage-grpo[{facts.extra}]"')
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    downloads = []
    for need in reward_needs(spec):
        if need.is_here:
            continue
        if need.is_hub_id and not offline:
            downloads.append(need.value)
        else:
            missing.append(f"{need.key.partition(': ')[2]} {need.value} is missing ({need.source})")
    key = str(spec.options.get("key_env", "")) if spec.name == "vlm_judge" else ""
    if key and not os.environ.get(key, "").strip():
        missing.append("the environment variable that key_env names is empty")  # unnamed: it may be the key itself
    notes = ("the server is asked when it is tried out",) if facts.network else ()
    return Readiness(tuple(missing), tuple(dict.fromkeys(downloads)), notes)
