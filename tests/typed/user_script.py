"""A program of somebody who writes types: it trains with a model, rewards, prompts, callbacks, a kernel and a sink of its own.

mypy reads it as strictly as it can (`make types`), and test_typed_program.py beside it runs it. Every line of `mistakes` must be an error: an
ignore that ignores nothing is one itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sage_grpo as sage
from sage_grpo import Conditioning, ModelSpec, VelocityModel, VideoSpec, own_reward, recipe, train
from sage_grpo.callbacks.metrics import Metrics, ShownClips, Sink
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.samplers.kernels import Kernel
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.transition import Transition

WORDS = ["a cat", "a red dog", "the sea"]


class Net(nn.Module):
    """The data of every prompt lie around one learned picture."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3, 2, 4, 4))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        slope: Tensor = (2 * sigma - 1) / ((1 - sigma) ** 2 + sigma**2)
        return slope * (x - (1 - sigma) * self.mean) - self.mean


class OwnModel:
    """The protocol, with attributes of narrower types than it asks for."""

    def __init__(self) -> None:
        self.spec = ModelSpec()
        self.video = VideoSpec(frames=2, height=4, width=4, fps=8.0)
        self.device = torch.device("cpu")
        self.shift = 3.0
        self.guidance_scale = 1.0
        self.network = Net()
        self.others: list[nn.Module] = []
        self._known: dict[str, Conditioning] = {}

    def encode(self, prompts: Sequence[str], images: Sequence[Tensor | None] | None = None) -> list[Conditioning]:
        for text in prompts:
            self._known.setdefault(text, Conditioning({"length": torch.tensor([float(len(text))])}))
        return [self._known[text] for text in prompts]

    def latent_shape(self) -> tuple[int, ...]:
        return (3, 2, 4, 4)

    def sigmas(self, num_steps: int, shift: float | None = None) -> Tensor:
        return Schedule.shifted(num_steps, self.shift if shift is None else shift).sigmas

    def velocity(
        self, x: Tensor, sigma: Tensor, conditions: Sequence[Conditioning], *, guidance: float | None = None
    ) -> Tensor:
        v: Tensor = self.network(x, sigma)
        return v

    def trains(self, sigma: Tensor | float) -> bool:
        return True

    def decode(self, latents: Tensor, progress: Callable[[int, int], None] | None = None) -> Tensor:
        return (torch.sigmoid(latents) * 255).to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()

    def blocks(self) -> list[nn.Module]:
        return []

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.network.named_parameters())

    def keep(self, levels: Sequence[str]) -> None: ...

    def place(self, part: str, device: str | torch.device) -> None: ...

    def unload_text(self) -> None: ...

    def load_lora(self, folder: str | Path) -> None:
        raise NotImplementedError

    def save(self, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None, merged: bool = False) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        own = {name: parameter.detach().clone() for name, parameter in self.trainable().items()}
        save_file({**own, **(weights or {})}, str(Path(folder) / "own.safetensors"))


class Bright:
    """A reward that is an object."""

    names = ("bright",)

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
        return {"bright": videos.float().mean(dim=(1, 2, 3, 4)) / 255}


def smooth(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """A reward that is a function."""
    return -(videos[:, 1:].float() - videos[:, :-1].float()).abs().mean(dim=(1, 2, 3, 4)) / 255


@dataclass(frozen=True)
class Halfway:
    """A kernel: Euler's step with noise of half its length."""

    leaves_noise: ClassVar[bool] = True

    def __call__(self, sigma: float | Tensor, sigma_next: float | Tensor) -> Transition:
        step = torch.as_tensor(sigma_next) - torch.as_tensor(sigma)
        return Transition(a=torch.ones_like(step), b=step, std=step.abs() / 2)


@dataclass(frozen=True)
class Told:
    """A sink, and what callbacks were told."""

    rows: list[Mapping[str, float]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.rows.append(metrics)

    def show(self, iteration: int, clips: ShownClips) -> None: ...

    def close(self) -> None: ...

    def iteration(self, event: sage.IterationEvent) -> None:
        self.events.append(f"iteration {event.iteration} of {len(event.videos)} clips")
        self.rows.append(event.metrics)

    def evaluation(self, event: sage.EvaluationEvent) -> None:
        self.events.append(f"evaluation {event.iteration}{', the best' if event.best else ''}")

    def checkpoint(self, event: sage.CheckpointEvent) -> None:
        self.events.append(f"checkpoint {event.folder.name}")

    def sentinel(self, event: sage.SentinelEvent) -> str:
        return f"{event.action}: {event.text}"


def small(out: Path) -> sage.TrainConfig:
    """A recipe, made small: every part of a configuration can be replaced."""
    return replace(
        recipe("shapes/sage"),
        out=str(out),
        iterations=1,
        batch=sage.BatchConfig(prompts=2, group_size=2, micro_batch=4),
        data=sage.DataConfig(prompts="shapes", eval_prompts="shapes"),
        rollout=sage.RolloutConfig(steps=4, window=sage.Window()),
        kernel=sage.KernelSpec(name="sage", eta=0.4),
        surrogate=sage.SurrogateConfig(),
        advantage=sage.AdvantageConfig(),
        trust_region=sage.TrustRegion(mode="none"),
        kl=sage.KlCoefficient(),
        update=sage.UpdateConfig(),
        optimizer=sage.OptimizerConfig(lr=1e-3),
        anchor=sage.AnchorConfig(),
        parallel=sage.ParallelSpec(),
        sentinel=sage.SentinelConfig(),
        evaluate=sage.EvalConfig(every=1, prompts=2, steps=2, show=1),
        keep=sage.KeepConfig(videos_every=0),
        log=sage.LogConfig(tensorboard=False, progress=False),
    )


def main(out: Path) -> tuple[Told, sage.TrainResult, sage.Clips]:
    """Train, evaluate and generate with what is above."""
    told, stop, model = Told(), sage.StopRequest(), OwnModel()
    rewards: list[sage.Reward] = [Bright()]
    prompts = [sage.Prompt(text, seed=place) for place, text in enumerate(WORDS)]
    result = train(
        small(out),
        model=model,
        rewards=[*rewards, own_reward(smooth, weights={"smooth": 0.1}, batch_size=4)],
        prompts=prompts,
        held_out=[{"prompt": "a tree", "seed": 3}, "a bird"],
        on_iteration=told.iteration,
        on_evaluation=told.evaluation,
        on_checkpoint=told.checkpoint,
        on_sentinel=told.sentinel,
        stop=stop,
        quiet=True,
    )
    trained: VelocityModel | None = result.model
    if trained is None:
        raise RuntimeError("The run was finished before.")
    scores: dict[str, float] = sage.evaluate(
        model=trained, rewards=[smooth, "video_stats"], prompts=WORDS, settings=sage.EvalConfig(steps=2), micro_batch=2
    ).metrics
    sink: Sink = told
    Metrics([sink]).write(result.iteration, scores)
    return told, result, sage.generate(WORDS, model=trained, steps=2, batch=3, seed=5)


def explore() -> Tensor:
    """A step further down: sample with a kernel of one's own."""
    kernel: Kernel = Halfway()
    model = OwnModel()
    policy = Policy(model, kernel, Schedule.shifted(4, model.shift))
    x = torch.zeros(1, *model.latent_shape())
    return integrate(policy, x, model.encode(WORDS[:1]), noise=lambda step: torch.full_like(x, float(step)))


def differences(run: str) -> dict[str, float]:
    """Of a run against its base."""
    pairs: sage.Pairs = sage.evaluate_pairs(
        run, model=ModelSpec(lora=sage.LoraSpec(rank=4)), rewards="video_stats", weights="best"
    )
    return {name: difference.change for name, difference in pairs.differences.items()}


def careful(file: Path) -> list[sage.Prompt]:
    """What goes wrong has a type."""
    try:
        return sage.load_prompts(file)
    except (sage.ConfigError, sage.RewardFailure) as error:
        raise SystemExit(str(error)) from error


def mistakes(config: sage.TrainConfig, model: OwnModel, event: sage.IterationEvent) -> None:
    """Never called: each line is one that mypy must not let pass."""
    train("shapes/sage")  # type: ignore[arg-type]
    train(config, model=model.network)  # type: ignore[arg-type]
    train(config, rewards=3)  # type: ignore[arg-type]
    train(config, prompts=[1, 2])  # type: ignore[list-item]
    train(config, on_iteration=Told().checkpoint)  # type: ignore[arg-type]
    train(config, iterations=3)  # type: ignore[call-arg]
    print(train(config).model.network)  # type: ignore[union-attr]
    sage.trian(config)  # type: ignore[attr-defined]
    sage.evaluate(model=Net())  # type: ignore[arg-type]
    sage.evaluate("run", weights="newest")  # type: ignore[arg-type]
    sage.evaluate_pairs("run", model=model)  # type: ignore[arg-type]
    replace(config, iterations="3")  # type: ignore[arg-type]
    sage.RewardSpec(name="video_stats", weights=["x"])  # type: ignore[arg-type]
    event.metrics["reward/total"].upper()  # type: ignore[attr-defined]
    takes(reward=smooth)  # type: ignore[arg-type]
    takes(kernel=Bright())  # type: ignore[arg-type]
    takes(sink=Bright())  # type: ignore[arg-type]
    takes(model=Net())  # type: ignore[arg-type]


def takes(
    *,
    reward: sage.Reward | None = None,
    kernel: Kernel | None = None,
    sink: Sink | None = None,
    model: VelocityModel | None = None,
) -> None:
    """Whatever fits the package's protocols."""
