"""Score a model on held-out prompts with the ODE and fixed seeds, or score existing video files, with any rewards.

`--run DIR` starts from a run: its model, trained weights, rewards, held-out prompts and evaluation settings, so that the figures are
those of its own evaluations; any option that you give wins. `--pairs` evaluates the base as well and compares clip by clip.
"""

from __future__ import annotations

import gc
import json as json_module
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sage_grpo.commands.export import read_config, trusted
from sage_grpo.commands.run_folder import Choice
from sage_grpo.inside import replace_text
from sage_grpo.models.spec import ModelSpec
from sage_grpo.ranges import Count, Natural, Share, check
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.rounding import fixed
from sage_grpo.training.config import EvalConfig

if TYPE_CHECKING:
    from sage_grpo.data.prompts import Prompt
    from sage_grpo.training.evaluate import Evaluation
    from sage_grpo.training.own import Own


def _shapes_reward() -> list[RewardSpec]:
    return [RewardSpec(name="shapes", weights={"TA": 1.0, "MQ": 0.5, "VQ": 0.5})]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to evaluate."""

    run: str | None = None
    """Folder of a run: its model, rewards, held-out prompts and settings become the defaults of the options below."""
    weights: Literal["final", "best", "base"] | None = None
    """Which weights of the run: after training (the default), of its best evaluation, or those it started from."""
    checkpoint: Natural | None = None
    """Weights of the run's checkpoint of this iteration."""
    ema: bool | None = None
    """Moving average of the weights, or the weights themselves; None is the average where the run keeps one."""
    model: ModelSpec = ModelSpec(train=False)
    """The model; without a run or a path, the small checkpoint that the package carries."""
    lora: str | None = None
    """Folder of a saved LoRA to add to the model, in place of a run's own."""
    pairs: bool = False
    """Evaluate the base model too, on the same prompts and noises, and give the differences with their intervals."""
    videos: Path | None = None
    """A folder of video files to score instead of a model's."""
    prompts: str | None = "shapes"
    """Prompts: a .txt, .csv, .json or .jsonl file, "shapes" for the embedded world's held-out split, "starter_eval" (or "starter") for those of
    the package, or "train" for a run's training prompts."""
    rewards: list[RewardSpec] = field(default_factory=_shapes_reward)
    """Rewards with their weights."""
    max_failed_fraction: Share = 0.25
    """Share of clips whose reward may fail."""
    settings: EvalConfig = EvalConfig()
    """Number of prompts, steps, seed."""
    micro_batch: Count = 8
    """Clips that are sampled, or read from files, together."""
    out: Path | None = None
    """Folder for scores.json (pairs.json), and for a contact sheet (or scores.csv for files)."""
    json: bool = False
    """Print JSON only."""
    trust_run: bool = False
    """Also load Python code and call reward servers that the run's config.yaml names. Code runs with all your rights."""

    def __post_init__(self) -> None:
        check(self)


def defaults(argv: list[str]) -> tuple[Options | None, list[str]]:
    """What the options start from: a run's own settings where the words name one."""
    from sage_grpo.configure import given

    run = given(argv, "run")
    if run is None:
        return None, argv
    return of_run(run, trust=trusted(argv), rewards=given(argv, "rewards") is None), argv


def of_run(run: str, *, trust: bool = False, rewards: bool = True) -> Options:
    """The options that repeat a run's own evaluation of its final weights; `trust` and `rewards` as in `read_config`."""
    config = read_config(Path(run), trust=trust, rewards=rewards)
    return Options(
        run=run,
        model=config.model,
        prompts=config.data.held_out,
        rewards=config.rewards,
        max_failed_fraction=config.max_failed_fraction,
        settings=config.evaluate,
        micro_batch=config.batch.micro_batch,
    )


def run(options: Options) -> int:
    """Evaluate and print."""
    from sage_grpo.rewards.base import RewardFailure

    try:
        if options.videos is not None:
            return _score_files(options)
        if options.pairs:
            _report_pairs(options)
        else:
            _report(measure(options), options)
    except RewardFailure as failure:
        print(f"sage-grpo evaluate stopped: {failure}", file=sys.stderr)
        return 1
    return 0


def measure(options: Options, own: Own | None = None) -> Evaluation:
    """Sample and score; what a program hands over takes the place of what the options name."""
    (result,) = _measure(options, [_choice(options)], own)
    return result


def measure_pair(options: Options, own: Own | None = None) -> tuple[Evaluation, Evaluation]:
    """The base and the tuned model, each as `measure` finds it alone."""
    choice = _choice(options)
    if not choice.tunes:
        raise ValueError(
            "--pairs compares a tuned model with its base: give --run runs/NAME (without --weights base) or --lora FOLDER."
        )
    base, tuned = _measure(options, [choice.base(), choice], own)
    return base, tuned


def _choice(options: Options) -> Choice:
    return Choice(
        run=options.run,
        weights=options.weights,
        checkpoint=options.checkpoint,
        ema=options.ema,
        lora=options.lora,
    )


def _measure(options: Options, choices: Sequence[Choice], own: Own | None = None) -> Iterator[Evaluation]:
    """An evaluation with each choice of weights, one model at a time."""
    from sage_grpo.models.devices import choose_device
    from sage_grpo.rewards.base import CompositeReward
    from sage_grpo.training.evaluate import evaluate
    from sage_grpo.training.own import Own
    from sage_grpo.training.scoring import try_rewards
    from sage_grpo.training.sources import first_frame

    own = own or Own()
    if own.model is None:  # before rewards are loaded, which takes long as well
        options.model.check_named()
    prompts = _prompts(options) if own.prompts is None else list(own.prompts)
    found = [choice.find(options.model) for choice in choices]
    reward = CompositeReward(
        options.rewards,
        max_failed_fraction=options.max_failed_fraction,
        device=choose_device(options.model.device) if own.model is None else own.model.device,
        require_weights=False,
        objects=own.rewards,
    )
    try_rewards(reward, prompts[0], options.model)
    for one in found:
        model = one.load(own.model)  # last: it takes minutes, and a mistake above is found in seconds
        yield evaluate(model, reward, prompts, options.settings, micro_batch=options.micro_batch, images=first_frame)
        del model
        gc.collect()  # the next model needs its memory


def _prompts(options: Options) -> list[Prompt]:
    from sage_grpo.training.sources import prompts_from

    if options.prompts is None and options.run is None:
        raise ValueError(
            "There are no prompts to evaluate on: give --prompts FILE, or leave it out for the embedded world's."
        )
    if options.prompts is None:
        raise ValueError(
            f"{options.run} was trained without held-out prompts. Give --prompts FILE, or --prompts train for the prompts that "
            "it was trained on."
        )
    if options.prompts != "train":
        return prompts_from(options.prompts, split="heldout")
    if options.run is None:
        raise ValueError("--prompts train means the training prompts of a run: give --run runs/NAME as well.")
    return prompts_from(read_config(Path(options.run), trust=True).data.prompts, split="train")


def _report(result: Evaluation, options: Options) -> None:
    metrics = {name.removeprefix("eval/"): value for name, value in result.metrics.items()}
    if result.report:
        print(result.report, file=sys.stderr)
    if options.json:
        print(json_module.dumps(metrics))
    else:
        width = max(map(len, metrics))
        print("\n".join(f"{name:<{width}}  {fixed(value, 4):>9}" for name, value in metrics.items()))
    if options.out is not None:
        from sage_grpo.video import contact_sheet

        replace_text(options.out / "scores.json", json_module.dumps(metrics, indent=1) + "\n")
        if len(result.clips):
            contact_sheet(options.out / "clips.png", list(result.clips), result.captions)


def _report_pairs(options: Options) -> None:
    from sage_grpo.commands import pairs

    base, tuned = measure_pair(options)
    for name, result in (("base", base), ("tuned", tuned)):
        if result.report:
            print(f"{name}: {result.report}", file=sys.stderr)
    found = pairs.compare(base, tuned)
    written = pairs.document(found, base, tuned)
    print(json_module.dumps(written) if options.json else pairs.table(found))
    if options.out is not None:
        pairs.write(options.out, written, base, tuned)


def _score_files(options: Options) -> int:
    from sage_grpo.commands.score_videos import score_videos, summary
    from sage_grpo.models.devices import choose_device
    from sage_grpo.training.sources import NAMES

    assert options.videos is not None
    if options.prompts is None or options.prompts in (*NAMES, "train"):
        raise ValueError("--videos needs --prompts FILE: one prompt per video, in the order of the file names.")
    base = Options() if options.run is None else of_run(options.run, trust=True)
    device, base = options.model.device, replace(base, model=replace(base.model, device=options.model.device))
    names = ("model", "settings", "weights", "checkpoint", "ema", "lora", "pairs", "max_failed_fraction")
    useless = [f"--{name}" for name in names if getattr(options, name) != getattr(base, name)]
    if useless:
        raise ValueError(
            f"--videos scores files that are there: {', '.join(useless)} would change nothing (--model.device does)."
        )
    rows = score_videos(
        options.videos,
        Path(options.prompts),
        options.rewards,
        output=options.out,
        device=choose_device(device),
        batch_size=options.micro_batch,
        show=not options.json,
    )
    if options.json:
        print(json_module.dumps(summary(rows)))
    return 0
