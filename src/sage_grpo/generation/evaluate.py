"""Held-out scores of any weights, sampled with the ODE from fixed seeds, with any rewards; and a clip-by-clip comparison with the base.

Clips of one prompt are not independent, so a prompt counts once: its difference is the mean over its clips, and the interval is Student's t
over prompts. Wins are counted by clips.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from json import dumps
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from sage_grpo.config.ranges import Count, Share, checked
from sage_grpo.data.prompts import too_few
from sage_grpo.models.spec import ModelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.saved import Choice, read_config
from sage_grpo.training.config import EvalConfig
from sage_grpo.training.inputs import check_routes, prompts_from, training_prompts
from sage_grpo.utils.json_schema import finite
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.statistics import paired_interval
from sage_grpo.utils.text import lines_on_the_way

if TYPE_CHECKING:
    from sage_grpo.data.prompts import Prompt
    from sage_grpo.training.evaluate import Evaluation
    from sage_grpo.training.inputs import Overrides


@checked
class EvaluateSpec(Choice):
    """Options of an evaluation."""

    model: ModelSpec = ModelSpec(train=False)
    """The model; by default the run's, or the included miniature."""
    prompts: str | None = "shapes"
    """Prompts: a file, shapes (held-out), starter_eval, or train for a run's training prompts."""
    rewards: list[RewardSpec] = field(
        default_factory=lambda: [RewardSpec(name="shapes", weights={"TA": 1.0, "MQ": 0.5, "VQ": 0.5})]
    )
    """Rewards with their weights."""
    max_failed_fraction: Share = 0.25
    """Share of clips whose reward may fail."""
    settings: EvalConfig = EvalConfig()
    """Number of prompts, steps and seed."""
    micro_batch: Count = 8
    """Clips per network pass, or read from files at a time."""

    @classmethod
    def of_run(cls, run: str, *, trust: bool, rewards: bool = True) -> Self:
        """Repeat a run's own evaluation of its final weights; `trust` and `rewards` as in `read_config`."""
        config = read_config(Path(run), trust=trust, rewards=rewards)
        return cls(
            run=run,
            model=config.model,
            prompts=config.data.held_out,
            rewards=config.rewards,
            max_failed_fraction=config.max_failed_fraction,
            settings=config.evaluate,
            micro_batch=config.batch.micro_batch,
        )


Say = Callable[[str], None]  # prints a line on the progress of an evaluation


def measure(options: EvaluateSpec, overrides: Overrides | None = None, say: Say = lambda text: None) -> Evaluation:
    (result,) = _measure(options, {"evaluation": options}, overrides, say)
    return result


def measure_pair(
    options: EvaluateSpec, overrides: Overrides | None = None, say: Say = lambda text: None
) -> tuple[Evaluation, ...]:
    """Evaluate the base and the tuned model, each as with `measure`."""
    if not options.tunes:
        raise ValueError(
            "--pairs compares a tuned model with its base: give --run runs/NAME (without --weights base) or --lora FOLDER."
        )
    return tuple(_measure(options, {"base": options.base(), "tuned": options}, overrides, say))


def _measure(
    options: EvaluateSpec, choices: Mapping[str, Choice], overrides: Overrides | None, say: Say
) -> Iterator[Evaluation]:
    from sage_grpo.models.devices import choose_device
    from sage_grpo.rewards.base import CompositeReward
    from sage_grpo.training.evaluate import evaluate
    from sage_grpo.training.inputs import Overrides, try_rewards

    given = overrides or Overrides()
    if given.model is None:  # before rewards are loaded, which is slow too
        options.model.check_named()
    prompts = _prompts(options) if given.prompts is None else list(given.prompts)
    check_routes(options.rewards, prompts)
    few = too_few(options.settings.prompts, len(prompts), "settings.prompts")
    if few:
        warnings.warn(few, stacklevel=2)
    located = {name: choice.find(options.model) for name, choice in choices.items()}
    reward = CompositeReward(
        options.rewards,
        max_failed_fraction=options.max_failed_fraction,
        device=choose_device(options.model.device) if given.model is None else given.model.device,
        require_weights=False,
        objects=given.rewards,
    )
    if not reward.weights:
        warnings.warn("No reward has a weight, so there is no total: give the parts that count weights.", stacklevel=2)
    try_rewards(reward, prompts, options.model)
    for name, weights in located.items():
        model = weights.load(given.model)  # last: loading takes minutes, and an error above is found in seconds
        settings = replace(options.settings, steps=options.settings.steps_for(options.model))
        progress = lines_on_the_way(name, say)
        result = evaluate(model, reward, prompts, settings, micro_batch=options.micro_batch, progress=progress)
        yield result if reward.weights else _without_total(result)
        del model
        gc.collect()  # the next model needs its memory


def _without_total(result: Evaluation) -> Evaluation:
    """An evaluation of rewards without weights, whose total would be 0 for every clip."""
    metrics = {name: value for name, value in result.metrics.items() if name not in ("eval/total", "eval/total_stderr")}
    scores = [{part: score for part, score in row["scores"].items() if part != "total"} for row in result.rows]
    return replace(result, metrics=metrics, rows=[{**row, "scores": one} for row, one in zip(result.rows, scores)])


def _prompts(options: EvaluateSpec) -> list[Prompt]:
    if options.prompts is None:
        cause = f"{options.run} was trained without held-out prompts" if options.run else "There are no prompts"
        raise ValueError(
            f"{cause}: give --prompts FILE, or, of a run, --prompts train for those that it was trained on."
        )
    if options.prompts != "train":
        return prompts_from(options.prompts, split="heldout")
    if options.run is None:
        raise ValueError("--prompts train means the training prompts of a run: give --run runs/NAME as well.")
    return training_prompts(read_config(Path(options.run), trust=True).data)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Change of one score by the tuned model."""

    base: float  # mean over the clips that have a score of both models
    tuned: float
    change: float  # mean over prompts of tuned minus base
    low: float  # ends of the 95% interval; NaN for a single prompt
    high: float
    p: float  # two-sided p-value of no change, for this score alone
    prompts: int
    pairs: int
    wins: int
    ties: int
    left_out: int

    @property
    def win_share(self) -> float:
        """Share of the pairs that the tuned model wins; a tie is half a win."""
        return (self.wins + 0.5 * self.ties) / self.pairs if self.pairs else math.nan


def compare(base: Evaluation, tuned: Evaluation) -> dict[str, Difference]:
    """The differences in every score, the total first."""
    names = [[row["prompt"], row["noise"]] for row in base.rows]
    if names != [[row["prompt"], row["noise"]] for row in tuned.rows]:
        raise ValueError("The two evaluations have other prompts or noises: only clips of the same can be paired.")
    scores = list(base.rows[0]["scores"]) if base.rows else []
    return {name: _difference(name, base.rows, tuned.rows) for name in scores}


def _difference(name: str, base: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]]) -> Difference:
    pairs: list[tuple[str, float, float]] = []
    for one, other in zip(base, tuned, strict=True):
        before, after = one["scores"][name], other["scores"][name]
        if before is not None and after is not None:
            pairs.append((one["prompt"], before, after))
    prompts: dict[str, list[tuple[float, float]]] = {}
    for prompt, before, after in pairs:
        prompts.setdefault(prompt, []).append((before, after))
    means = ({place: fmean(one[side] for one in own) for place, own in enumerate(prompts.values())} for side in (1, 0))
    interval = paired_interval(*means)
    return Difference(
        base=fmean(before for _, before, _ in pairs) if pairs else math.nan,
        tuned=fmean(after for _, _, after in pairs) if pairs else math.nan,
        change=interval.mean,
        low=interval.low,
        high=interval.high,
        p=interval.p,
        prompts=interval.count,
        pairs=len(pairs),
        wins=sum(after > before for _, before, after in pairs),
        ties=sum(after == before for _, before, after in pairs),
        left_out=len(base) - len(pairs),
    )


def pairs_document(differences: Mapping[str, Difference], base: Evaluation, tuned: Evaluation) -> dict[str, Any]:
    base_metrics, tuned_metrics = (
        finite({name.removeprefix("eval/"): value for name, value in one.metrics.items()}) for one in (base, tuned)
    )
    return {
        "base": base_metrics,
        "tuned": tuned_metrics,
        "differences": {name: finite({**asdict(one), "win_share": one.win_share}) for name, one in differences.items()},
        "pairs": [
            {"prompt": one["prompt"], "noise": one["noise"], "base": one["scores"], "tuned": other["scores"]}
            for one, other in zip(base.rows, tuned.rows, strict=True)
        ],
    }


def write_pairs(folder: Path, written: Mapping[str, Any], base: Evaluation, tuned: Evaluation) -> None:
    """Write pairs.json, and a contact sheet with every base clip above its tuned one."""
    from sage_grpo.utils.video import contact_sheet

    replace_text(folder / "pairs.json", dumps(written, indent=1) + "\n")
    if len(base.clips):
        clips = [clip for pair in zip(base.clips, tuned.clips) for clip in pair]
        captions = [f"{name}: {text}" for text in base.captions for name in ("base", "tuned")]
        contact_sheet(folder / "pairs.png", clips, captions)
