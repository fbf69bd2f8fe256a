"""What a configuration says about one reward, and how that becomes an object."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from sage_grpo.effects import Speed
from sage_grpo.named import NoSuchModule, import_object
from sage_grpo.objects import refuse_object
from sage_grpo.ranges import Finite, Natural, checked
from sage_grpo.rewards.functions import FunctionReward, RewardConfigError, nearest
from sage_grpo.types import Reward, RewardFacts

BUILT_IN: Mapping[str, str] = {
    "videoalign": "sage_grpo.rewards.built_in.videoalign:VideoAlign",
    "clip": "sage_grpo.rewards.built_in.clip:ClipScore",
    "pickscore": "sage_grpo.rewards.built_in.clip:PickScore",
    "aesthetic": "sage_grpo.rewards.built_in.clip:Aesthetic",
    "hpsv2": "sage_grpo.rewards.built_in.hpsv2:Hpsv2",
    "hpsv3": "sage_grpo.rewards.built_in.hpsv3:Hpsv3",
    "imagereward": "sage_grpo.rewards.built_in.imagereward:ImageReward",
    "subject_consistency": "sage_grpo.rewards.built_in.consistency:SubjectConsistency",
    "background_consistency": "sage_grpo.rewards.built_in.consistency:BackgroundConsistency",
    "video_stats": "sage_grpo.rewards.built_in.video_stats:VideoStats",
    "ocr": "sage_grpo.rewards.built_in.ocr:OcrReward",
    "remote": "sage_grpo.rewards.serving.remote:RemoteReward",
    "vlm_judge": "sage_grpo.rewards.judge.vlm:VlmJudge",
    "shapes": "sage_grpo.shapes.judge:ShapesJudge",
    "shapes_proxy": "sage_grpo.shapes.judge:NaiveProxy",
}
"""Names of the rewards that come with the package; import paths, loaded only when asked for. Each class says all about itself in `facts`."""


@checked
class RewardSpec:
    """One reward of a run."""

    name: str
    """A built-in name (videoalign, clip, pickscore, ...) or an import path "module:function"."""
    label: str = ""
    """How the reward is called in logs; needed only to tell two rewards with the same name apart."""
    weights: dict[str, Finite] = field(default_factory=dict)
    """Weight of each part in the total. May be left out for a reward with one part (weight 1)."""
    metric_only: bool = False
    """Log the parts, but keep them out of the total."""
    standardize: dict[str, list[Finite]] = field(default_factory=dict)
    """Part -> [mean, std]: report (raw - mean) / std instead of the raw score."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward's constructor, or of the function."""
    batch_size: Speed[Natural | None] = None
    """Clips a call; 0: all at once. Default 8, and 0 for `remote` and `vlm_judge`. Halved when memory runs out."""
    device: Speed[str] = ""
    """A device of its own ("cuda:1"), on which the reward stays for the whole run; empty is the run's device, which the rewards
    leave to the policy between their calls."""
    overlap: Speed[bool] = False
    """Score in a thread of its own, at the same time as the other rewards: for rewards that wait for a network."""
    isolate_failures: Speed[bool | None] = None
    """After an exception, call again with halves of the batch to find the clip that fails, at most 2 log2(n) times. Default: yes
    for what runs here, no for `remote`, `vlm_judge` and async functions, whose calls may cost money."""
    try_out: Speed[bool] = True
    """Call it once with a small clip before anything expensive starts."""

    def __post_init__(self) -> None:
        for part, pair in self.standardize.items():
            if len(pair) != 2 or pair[1] <= 0:
                raise RewardConfigError(
                    f"Reward {self.title!r}: standardize.{part} must be [mean, std] with a positive std, got {list(pair)}."
                )

    @property
    def counts(self) -> bool:
        """Whether the reward may have a part in the total; one without weights counts when it has one part."""
        return not self.metric_only and (not self.weights or any(self.weights.values()))

    @property
    def title(self) -> str:
        """The label, or the name without its module."""
        return self.label or self.name.rsplit(":", 1)[-1]


def facts_of(name: str) -> RewardFacts | None:
    """What is known about a built-in reward; None for any other name. Its module is imported, its weights are not."""
    return find_reward(RewardSpec(name=name)).facts if name in BUILT_IN else None


def load_reward(spec: RewardSpec) -> Reward:
    """Build the reward that a spec names; RewardConfigError (a ValueError) names the nearest valid choice."""
    target, options = find_reward(spec), dict(spec.options)
    if inspect.isclass(target):
        return _construct(target, options, spec)
    return FunctionReward(target, **{"parts": list(spec.weights), **options})


def find_reward(spec: RewardSpec) -> Any:
    """The function or class that a spec names, which is not called yet."""
    refuse_object(spec.name, "a reward", "Give other rewards (--rewards)")
    path = spec.name if ":" in spec.name else BUILT_IN.get(spec.name)
    if path is None:
        raise RewardConfigError(
            f"Unknown reward {spec.name!r}.{nearest(spec.name, BUILT_IN)} Your own reward is written module:function."
        )
    try:
        target = import_object(path, "Reward")
    except NoSuchModule as error:
        raise RewardConfigError(str(error)) from error
    if not callable(target):
        raise RewardConfigError(f"{path} is a {type(target).__name__}, neither a function nor a class.")
    _check_kind(target, spec)
    return target


def _check_kind(target: Any, spec: RewardSpec) -> None:
    """Nothing that is not written as a reward is called: constructing subprocess:Popen would already run a command."""
    if inspect.isclass(target):
        methods = [
            vars(kind)[name] for kind in target.__mro__ for name in ("__call__", "forward") if name in vars(kind)
        ]
        if not any(_named_arguments(method) >= 4 for method in methods):  # self, videos, prompts, fps
            raise RewardConfigError(
                f"{spec.name!r} is no reward: the class {target.__name__} has no __call__(self, videos, prompts, fps) with `names`; "
                "see docs/rewards.md."
            )
        return
    needed = "frames, prompts" if spec.options.get("per_frame") else "videos, prompts, fps"
    if _named_arguments(target) < 2 + (needed != "frames, prompts"):
        raise RewardConfigError(
            f"{spec.name!r} is no reward: a reward is a Python function ({needed}), see docs/rewards.md."
        )


def _named_arguments(function: Any) -> int:
    """Positional arguments that a Python function names one by one; *args swallows anything, C code says nothing."""
    if inspect.isbuiltin(function):
        return 0
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def _construct(target: type, options: dict[str, Any], spec: RewardSpec) -> Reward:
    parameters = inspect.signature(target).parameters
    if "parts" in parameters and spec.weights:
        options.setdefault("parts", list(spec.weights))
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in options:
        if name not in parameters and not takes_any:
            raise RewardConfigError(f"Reward {spec.name!r} has no option {name!r}.{nearest(name, parameters)}")
    for name, parameter in parameters.items():
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variable and name not in options:
            raise RewardConfigError(f"Reward {spec.name!r} needs the option {name!r}.")
    reward = target(**options)
    if not isinstance(reward, Reward):
        raise RewardConfigError(
            f"{spec.name!r} is no reward: it needs `names` and __call__(videos, prompts, fps); see docs/rewards.md."
        )
    return reward
