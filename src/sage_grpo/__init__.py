"""SAGE-GRPO: reinforcement-learning post-training of flow-matching video generators.

From Python (docs/api.md): `train`, `evaluate` and `generate`, the recipes, the configuration's parts, and the types of arguments
and events. Each name is imported when it is first used, so that `import sage_grpo` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sage_grpo.version import __version__ as __version__

_HOMES = {
    "api": ("Clips", "Pairs", "TrainResult", "evaluate", "evaluate_pairs", "generate", "train"),
    "config.parsing": ("ConfigError",),
    "data.prompts": ("Prompt", "load_prompts"),
    "samplers.kernels": ("KernelSpec",),
    "samplers.windows": ("Window",),
    "health.config": ("SentinelConfig",),
    "models.base": ("VelocityModel",),
    "models.spec": ("LoraSpec", "ModelSpec"),
    "distributed.spec": ("ParallelSpec",),
    "recipes": ("recipe",),
    "rewards.member": ("RewardFailure",),
    "rewards.spec": ("RewardSpec", "own_reward"),
    "objectives.kl_control": ("KlCoefficient",),
    "objectives.trust_region": ("TrustRegion",),
    "training.events": ("CheckpointEvent", "EvaluationEvent", "IterationEvent", "SentinelEvent", "StopRequest"),
    "training.config": (
        "AdvantageConfig", "AnchorConfig", "BatchConfig", "DataConfig", "EvalConfig", "KeepConfig", "LogConfig",
        "OptimizerConfig", "RolloutConfig", "SurrogateConfig", "TrainConfig", "UpdateConfig",
    ),
    "types": ("Conditioning", "Reward", "VideoSpec"),
}  # fmt: skip
"""Public names by module."""

__all__ = sorted(name for names in _HOMES.values() for name in names)

if TYPE_CHECKING:
    from sage_grpo.api import Clips as Clips
    from sage_grpo.api import Pairs as Pairs
    from sage_grpo.api import TrainResult as TrainResult
    from sage_grpo.api import evaluate as evaluate
    from sage_grpo.api import evaluate_pairs as evaluate_pairs
    from sage_grpo.api import generate as generate
    from sage_grpo.api import train as train
    from sage_grpo.config.parsing import ConfigError as ConfigError
    from sage_grpo.data.prompts import Prompt as Prompt
    from sage_grpo.data.prompts import load_prompts as load_prompts
    from sage_grpo.distributed.spec import ParallelSpec as ParallelSpec
    from sage_grpo.health.config import SentinelConfig as SentinelConfig
    from sage_grpo.models.base import VelocityModel as VelocityModel
    from sage_grpo.models.spec import LoraSpec as LoraSpec
    from sage_grpo.models.spec import ModelSpec as ModelSpec
    from sage_grpo.objectives.kl_control import KlCoefficient as KlCoefficient
    from sage_grpo.objectives.trust_region import TrustRegion as TrustRegion
    from sage_grpo.recipes import recipe as recipe
    from sage_grpo.rewards.member import RewardFailure as RewardFailure
    from sage_grpo.rewards.spec import RewardSpec as RewardSpec
    from sage_grpo.rewards.spec import own_reward as own_reward
    from sage_grpo.samplers.kernels import KernelSpec as KernelSpec
    from sage_grpo.samplers.windows import Window as Window
    from sage_grpo.training.config import AdvantageConfig as AdvantageConfig
    from sage_grpo.training.config import AnchorConfig as AnchorConfig
    from sage_grpo.training.config import BatchConfig as BatchConfig
    from sage_grpo.training.config import DataConfig as DataConfig
    from sage_grpo.training.config import EvalConfig as EvalConfig
    from sage_grpo.training.config import KeepConfig as KeepConfig
    from sage_grpo.training.config import LogConfig as LogConfig
    from sage_grpo.training.config import OptimizerConfig as OptimizerConfig
    from sage_grpo.training.config import RolloutConfig as RolloutConfig
    from sage_grpo.training.config import SurrogateConfig as SurrogateConfig
    from sage_grpo.training.config import TrainConfig as TrainConfig
    from sage_grpo.training.config import UpdateConfig as UpdateConfig
    from sage_grpo.training.events import CheckpointEvent as CheckpointEvent
    from sage_grpo.training.events import EvaluationEvent as EvaluationEvent
    from sage_grpo.training.events import IterationEvent as IterationEvent
    from sage_grpo.training.events import SentinelEvent as SentinelEvent
    from sage_grpo.training.events import StopRequest as StopRequest
    from sage_grpo.types import Conditioning as Conditioning
    from sage_grpo.types import Reward as Reward
    from sage_grpo.types import VideoSpec as VideoSpec
else:  # hidden from type checkers, which would accept every misspelt name

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(import_module(f"{__name__}.{home}"), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*{*globals(), *__all__}]
