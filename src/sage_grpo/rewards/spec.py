"""The specification of one reward, its needs on this machine, and its construction."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from sage_grpo.config.metadata import Speed
from sage_grpo.config.ranges import Finite, Natural, NotNegative, checked
from sage_grpo.rewards.functions import (
    DifferentiableFunction,
    FunctionReward,
    RewardConfigError,
    check_known,
    nearest,
    where_raised,
)
from sage_grpo.types import Reward, RewardFacts
from sage_grpo.utils.imports import NoSuchModule, import_object, name_of, refuse_object

BUILT_IN: Mapping[str, str] = {
    "videoalign": "sage_grpo.rewards.built_in.videoalign:VideoAlign",
    "clip": "sage_grpo.rewards.built_in.clip:ClipScore",
    "pickscore": "sage_grpo.rewards.built_in.clip:PickScore",
    "aesthetic": "sage_grpo.rewards.built_in.clip:Aesthetic",
    "hpsv2": "sage_grpo.rewards.built_in.clip:Hpsv2",
    "hpsv3": "sage_grpo.rewards.built_in.hpsv3:Hpsv3",
    "video_stats": "sage_grpo.rewards.built_in.video_stats:VideoStats",
    "clap": "sage_grpo.rewards.built_in.sound:Clap",
    "ocr": "sage_grpo.rewards.built_in.ocr:OcrReward",
    "remote": "sage_grpo.rewards.serving.remote:RemoteReward",
    "vlm_judge": "sage_grpo.rewards.built_in.vlm_judge:VlmJudge",
    "shapes": "sage_grpo.worlds.shapes.judge:ShapesJudge",
    "shapes_proxy": "sage_grpo.worlds.shapes.judge:NaiveProxy",
}
"""Names of the rewards that come with the package; import paths, loaded only when asked for. Each class says all about itself in `facts`."""
GONE: Mapping[str, str] = {
    "scenes": "name it 'research.scenes.judge:ScenesJudge', in the folder of the project's repository (research/README.md)",
    "scenes_learned": "name it 'research.scenes.learned:LearnedReward', in the folder of the project's repository (research/README.md)",
    "imagereward": "hpsv2, hpsv3 and pickscore are models of human preference",
    "subject_consistency": "video_stats has motion, warp_error and midframe_error",
    "sound_stats": "write a function with a parameter `sound` (docs/sound.md)",
    "sight_and_sound": "write a reward with a parameter `sound` (docs/sound.md), for example on transformers' PeAudioVideoModel",
    "background_consistency": "video_stats has motion, warp_error and midframe_error",
}
"""Rewards that earlier versions knew by a name, and what to do."""


@checked
class Gate:
    """Condition under which a reward's parts count: where `part` < `floor`, they count as `below`."""

    part: str
    """The part that is compared: one of this reward or of another one, by its name in the metrics."""
    floor: Finite
    """Least value of the part at which the others count."""
    below: Finite = 0.0
    """Score that takes their place below the floor; at most what they reach above it."""
    only: list[str] = field(default_factory=list)
    """Parts of this reward that it applies to; empty is all but `part` itself."""


@checked
class RewardSpec:
    """One reward."""

    name: str
    """A built-in reward (videoalign, clip, ...) or your own as module:function."""
    label: str = ""
    """Name in logs, to tell two rewards of one name apart."""
    weights: dict[str, Finite] = field(default_factory=dict)
    """Weight of each part in the total; optional for a reward with one part."""
    metric_only: bool = False
    """Log the reward, but do not train on it."""
    schedule: list[list[NotNegative]] = field(default_factory=list)
    """Factor on its weights over the run: [[iteration, factor], ...], linear in between; evaluations take the last one."""
    gate: Gate | None = None
    """Condition under which its parts count."""
    judges: str = ""
    """LTX-2: the modality whose advantage it sets (video or audio); empty is all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward's constructor or function."""
    batch_size: Speed[Natural | None] = None
    """Clips per call; 0 is all. Default 8, or 0 for remote and vlm_judge."""
    device: Speed[str] = ""
    """Device on which the reward stays loaded ("cuda:1"); empty shares the run's device."""
    overlap: Speed[bool] = False
    """Score in a separate thread; for rewards that wait for a network."""
    try_out: Speed[bool] = True
    """Test the reward with a small clip before training starts."""

    def __post_init__(self) -> None:
        points = [point[0] for point in self.schedule if len(point) == 2 and point[0] == int(point[0])]
        if len(points) < len(self.schedule) or points != sorted(set(points)):
            raise ValueError(
                f"rewards {self.title}: schedule is a list of [iteration, factor] with rising whole iterations, got {self.schedule}."
            )
        if self.metric_only and (self.schedule or self.gate is not None):
            raise ValueError(
                f"rewards {self.title}: metric_only, so that schedule and gate do nothing: leave them out."
            )

    def factor(self, iteration: int | None = None) -> float:
        """Factor on the weights at an iteration (None: after the last point of the schedule)."""
        points = self.schedule or [[0, 1.0]]
        if iteration is None or iteration >= points[-1][0]:
            return points[-1][1]
        for (start, before), (stop, after) in pairwise(points):
            if start <= iteration < stop:
                return before + (after - before) * (iteration - start) / (stop - start)
        return points[0][1]

    @property
    def over_time(self) -> str:
        """A sentence about schedule and gate; empty without them."""
        steps = [f"x {factor:g} at iteration {number:g}" for number, factor in self.schedule]
        said = [f"weights {', '.join(steps)}"] if steps else []
        if (gate := self.gate) is not None:
            parts = ", ".join(gate.only) or f"all parts but {gate.part}"
            said.append(f"{parts} count as {gate.below:g} where {gate.part} < {gate.floor:g}")
        return f"reward {self.title}: {'; '.join(said)}" if said else ""

    @property
    def counts(self) -> bool:
        """True if the reward may have a part in the total; one without weights counts when it has one part."""
        return not self.metric_only and (not self.weights or any(self.weights.values()))

    @property
    def reads_latents(self) -> bool:
        """True if its options ask for latents alone; of a class only the object knows."""
        return self.options.get("reads") == "latents"

    @property
    def title(self) -> str:
        return self.label or self.name.rsplit(":", 1)[-1]


def facts_of(name: str) -> RewardFacts | None:
    """Facts about a built-in reward; None for any other name. Its module is imported, its weights are not."""
    return find_reward(RewardSpec(name=name)).facts if name in BUILT_IN else None


def has_gradient(spec: RewardSpec) -> bool:
    """True if a reward can be differentiated; nothing is loaded."""
    target = find_reward(spec)
    return hasattr(target, "differentiable") if inspect.isclass(target) else bool(spec.options.get("differentiable"))


def load_reward(spec: RewardSpec) -> Reward:
    """Build the reward that a spec names; RewardConfigError (a ValueError) names the nearest valid choice."""
    target, options = find_reward(spec), dict(spec.options)
    if inspect.isclass(target):
        return _construct(target, options, spec)
    return function_reward(target, {"parts": list(spec.weights), **options})


def function_reward(function: Callable[..., Any], options: Mapping[str, Any]) -> FunctionReward:
    """A function as a reward of the kind that its options select."""
    more = {name: value for name, value in options.items() if name != "differentiable"}
    if not options.get("differentiable", False):
        return FunctionReward(function, **more)
    if options.get("takes", "clips") != "clips":
        raise RewardConfigError(
            f"takes: {options['takes']} does not go with differentiable, which takes clips one by one."
        )
    return DifferentiableFunction(function, **more)


def find_reward(spec: RewardSpec) -> Any:
    """The function or class that a spec names, not called yet."""
    refuse_object(spec.name, "a reward", "Give other rewards (--rewards)")
    if spec.name in GONE:
        raise RewardConfigError(f"The reward {spec.name!r} is not in the package any more: {GONE[spec.name]}.")
    if ":" not in spec.name and spec.name not in BUILT_IN:
        raise RewardConfigError(
            f"Unknown reward {spec.name!r}.{nearest(spec.name, BUILT_IN)} Your own is module:function."
        )
    try:
        target = import_object(BUILT_IN.get(spec.name, spec.name), "Reward")
    except NoSuchModule as error:
        raise RewardConfigError(str(error)) from error
    if not callable(target):
        raise RewardConfigError(f"{spec.name} is a {type(target).__name__}, neither a function nor a class.")
    _check_kind(target, spec)
    return target


def _check_kind(target: Any, spec: RewardSpec) -> None:
    """Refuse targets that are not written as rewards: constructing subprocess:Popen would already run a command."""
    if inspect.isclass(target):
        methods = [vars(kind).get(name) for kind in target.__mro__ for name in ("__call__", "forward")]
        if not any(_named_arguments(method) >= 4 for method in methods if method):  # self, videos, prompts, fps
            raise RewardConfigError(
                f"{spec.name!r} is not a reward: the class {target.__name__} has no __call__(self, videos, prompts, fps) with `names`; "
                "see docs/rewards.md."
            )
        return
    if _named_arguments(target) < 3:
        raise RewardConfigError(
            f"{spec.name!r} is not a reward: it is a Python function (videos, prompts, fps), see docs/rewards.md."
        )


def _named_arguments(function: Any) -> int:
    """Number of named positional parameters of a Python function; *args does not count, C code has none."""
    parameters: Iterable[inspect.Parameter] = ()
    with suppress(TypeError, ValueError):
        parameters = () if inspect.isbuiltin(function) else inspect.signature(function).parameters.values()
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def _construct(target: type, options: dict[str, Any], spec: RewardSpec) -> Reward:
    parameters = inspect.signature(target).parameters
    if "parts" in parameters and spec.weights:
        options.setdefault("parts", list(spec.weights))
    variable = {one.name for one in parameters.values() if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        check_known(options, parameters, f"Reward {spec.name!r} has no option")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in variable and name not in options:
            raise RewardConfigError(f"Reward {spec.name!r} needs the option {name!r}.")
    try:
        reward = target(**options)
    except Exception as error:  # user code may raise anything
        if isinstance(error, RewardConfigError) or ":" not in spec.name:
            raise
        raise RewardConfigError(
            f"Reward {spec.name!r} cannot be set up: {type(error).__name__}: {error}{where_raised(error)}"
        ) from error
    if not isinstance(reward, Reward):
        raise RewardConfigError(f"{spec.name!r} is not a reward: it needs `names` and __call__(videos, prompts, fps).")
    return reward


@dataclass(frozen=True)
class Need:
    """A file or folder that an option names."""

    key: str  # the option's name in errors
    value: str
    source: str
    hub: str = ""  # a file by which to find it in the hub's cache; empty if only a path is allowed
    repo: str = ""  # the repository on the hub that a folder at this path is a copy of
    pinned: bool = False  # a name on the hub needs its commit (owner/name@COMMIT): without one, owner/name is a folder

    @property
    def is_hub_id(self) -> bool:
        """True if the value can be a name on the hub: owner/name, and not a path."""
        named = self.value.count("/") == 1 and not self.value.startswith((".", "/", "~"))
        return bool(self.hub) and named and ("@" in self.value or not self.pinned)

    @property
    def is_here(self) -> bool:
        """True if it is on this machine, as a path or in the hub's cache."""
        if Path(self.value).expanduser().exists():
            return True
        if not self.is_hub_id:
            return False
        from huggingface_hub import try_to_load_from_cache

        repo, _, revision = self.value.partition("@")
        return isinstance(try_to_load_from_cache(repo, self.hub, revision=revision or None), str)


def reward_needs(spec: RewardSpec) -> Iterator[Need]:
    facts = facts_of(spec.name)
    for option, file in facts.files.items() if facts is not None else ():
        value = spec.options.get(option)
        if isinstance(value, str) and value:
            key, source = f"rewards {spec.title}: {option}", file.text.format(value=value)
            yield Need(key, value, source, file.hub, file.repo, pinned=bool(file.repo))


@dataclass(frozen=True)
class Readiness:
    """Missing requirements of a reward on this machine."""

    missing: tuple[str, ...] = ()  # steps that the user has to take
    downloads: tuple[str, ...] = ()  # repositories that will be downloaded from the hub
    notes: tuple[str, ...] = ()  # requirements that could not be checked

    @property
    def ready(self) -> bool:
        return not self.missing

    def describe(self) -> str:
        return "; ".join([*self.missing, *(f"downloads {name}" for name in self.downloads), *self.notes]) or "ready"


def needed_options(name: str) -> list[str]:
    parameters = inspect.signature(find_reward(RewardSpec(name=name))).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.KEYWORD_ONLY]


def readiness(spec: RewardSpec) -> Readiness:
    """Readiness of a configured reward on this machine, without loading it."""
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
        # its name is not shown: it may be the key itself
        missing.append("the environment variable that key_env names is empty")
    notes = ("the server is called when the reward is tried out",) if facts.network else ()
    return Readiness(tuple(missing), tuple(dict.fromkeys(downloads)), notes)


@dataclass(frozen=True)
class GivenReward:
    """A reward object with its settings."""

    spec: RewardSpec
    reward: Reward


RewardLike = str | RewardSpec | GivenReward | Reward | Callable[..., Any]
"""A reward for `gather_rewards`: its name or spec, or an object or a function."""


def own_reward(target: Reward | Callable[..., Any], **settings: Any) -> GivenReward:
    """An object or a function as a reward, with the settings of a RewardSpec (label, weights, metric_only, batch_size, ...).

    An object has `names` and `__call__(videos, prompts, fps)`. For functions see docs/rewards.md; `options` are a function's further arguments, and
    its parts are the keys of `weights`, or one of its own name.
    """
    check_known(settings, {field.name for field in fields(RewardSpec)} - {"name"}, "own_reward has no setting")
    if inspect.isclass(target):
        raise RewardConfigError(f"{target.__name__} is a class: give an object of it, {target.__name__}(...).")
    plain = target.__name__ if inspect.isroutine(target) else type(target).__name__
    label = settings.get("label") or ("reward" if plain == "<lambda>" else plain)
    spec = RewardSpec(name=name_of(label), **settings)
    if isinstance(target, Reward):
        if spec.options:
            raise RewardConfigError(f"options are arguments of a function; {label} is an object: set it up yourself.")
        return GivenReward(spec, target)
    if not callable(target):
        raise RewardConfigError(
            f"A {type(target).__name__} is not a reward: give a function (videos, prompts, fps), or an object with `names` and "
            "__call__(videos, prompts, fps); see docs/rewards.md."
        )
    return GivenReward(spec, function_reward(target, {"parts": list(spec.weights) or [label], **spec.options}))


def gather_rewards(rewards: RewardLike | Sequence[RewardLike]) -> tuple[list[RewardSpec], dict[str, Reward]]:
    """Specs and objects (by the names in their specs) of one reward or a list of them."""
    given = list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    specs: list[RewardSpec] = []
    objects: dict[str, Reward] = {}
    for one in given:
        if isinstance(one, str):
            one = RewardSpec(name=one)
        if isinstance(one, Mapping):
            raise RewardConfigError(f"A reward was given as a mapping: write RewardSpec(name={one.get('name')!r}).")
        if isinstance(one, RewardSpec):
            specs.append(one)
            continue
        one = one if isinstance(one, GivenReward) else own_reward(one)
        if one.spec.name in objects:
            raise RewardConfigError(
                f"Two rewards are called {one.spec.title!r}: give each its own_reward(..., label=)."
            )
        specs.append(one.spec)
        objects[one.spec.name] = one.reward
    return specs, objects
