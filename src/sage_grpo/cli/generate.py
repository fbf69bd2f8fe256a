"""Generate clips (mp4) and a contact sheet, with any sampler, LoRA or checkpoint.

`--run DIR` uses a run's model and weights with its own sizes, fps, guidance, shift and precision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sage_grpo.cli.starting import say_whose_model, trusted
from sage_grpo.config.parsing import given
from sage_grpo.config.ranges import Count, Folder
from sage_grpo.generation.generate import GenerateSpec, clips_of, prompts_of, sample
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.saved import refuse_own
from sage_grpo.utils.safe_io import replace_text

if TYPE_CHECKING:
    import torch

    from sage_grpo.generation.files import ScoredVideo
    from sage_grpo.generation.generate import ClipRequest
    from sage_grpo.rewards.base import CompositeReward


@dataclass(frozen=True, kw_only=True)
class Options(GenerateSpec):
    """Clips to generate, and their folder."""

    out: Folder = "outputs"
    """Folder of the clips."""
    first: Count | None = None
    """Use only the first N prompts of a list."""
    rewards: list[RewardSpec] = field(default_factory=list)
    """Score the clips, and write each prompt's best and worst to pairs.jsonl for data.clips (docs/preferences.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rewards and self.per_prompt < 2:
            raise ValueError("--rewards makes pairs of the clips of a prompt: set --per_prompt to 2 or more.")
        if self.rewards and not any(reward.counts for reward in self.rewards):
            raise ValueError(
                "--rewards: none of them has a weight, so that no clip is better than another. Give one a weight."
            )


def defaults(argv: list[str]) -> tuple[Options | None, list[str]]:
    run = given(argv, "run")
    return None if run is None else Options.of_run(run, trust=trusted(argv)), argv


def run(options: Options) -> int:
    out = Path(options.out)
    say_whose_model(options)
    if options.run is not None:
        refuse_own(out, Path(options.run))
    from sage_grpo.generation.files import score_clips
    from sage_grpo.utils.video import contact_sheet, write_mp4

    clips = clips_of(options, prompts_of(options)[: options.first])
    reward, rows = _judged(options, clips) if options.rewards else (None, [])
    model = options.find(options.model).load()
    videos: list[torch.Tensor] = []
    for some, batch, sound in sample(options, model, clips):
        for place, (clip, video) in enumerate(zip(some, batch)):
            write_mp4(out / clip.file, video, model.video.fps, sound=None if sound is None else sound[place])
        if reward is not None:  # as sampled, without the codec's loss
            scored = rows[len(videos) : len(videos) + len(some)]
            for row in scored:
                row.fps = model.video.fps
            score_clips(reward, scored, batch, sound)
        videos += batch
    if reward is not None:
        print(_pairs(out, rows))
        return 0
    sheet = contact_sheet(out / "contact_sheet.png", videos, [clip.prompt.text for clip in clips])
    print(f"{len(clips)} clips and {sheet.name} in {out}")
    return 0


def _judged(options: Options, clips: Sequence[ClipRequest]) -> tuple[CompositeReward, list[ScoredVideo]]:
    """The rewards, tried out before sampling, and a row for each clip."""
    from sage_grpo.generation.files import ScoredVideo, judge
    from sage_grpo.models.devices import choose_device
    from sage_grpo.training.inputs import check_routes

    prompts = [clip.prompt for clip in clips]
    check_routes(options.rewards, prompts)
    rows = [
        ScoredVideo(clip.file, one.text, {**one.metadata, **one.columns(absolute=True)}, rewards=one.rewards)
        for clip, one in zip(clips, prompts)
    ]
    return judge(options.rewards, rows, choose_device(options.model.device)), rows


def _pairs(out: Path, rows: Sequence[ScoredVideo]) -> str:
    """Write the scores, and the best and the worst clip of each prompt; returns a summary."""
    from sage_grpo.data.examples import LISTS
    from sage_grpo.generation.files import best_and_worst, refuse_unscored, write_scores

    write_scores(out, rows)
    listed = [{**row.metadata, "prompt": row.prompt, "video": row.video} for row in rows]
    replace_text(out / "prompts.jsonl", _lines(listed))
    refuse_unscored(out, rows)
    pairs = best_and_worst(rows)
    replace_text(out / LISTS[0], _lines(pairs))
    alike = len({row.prompt for row in rows}) - len(pairs)
    left = f" {alike} prompts are left out: fewer than two of their clips have a score, or all have the same."
    return f"{len(rows)} clips, their scores and {len(pairs)} pairs ({LISTS[0]}) in {out}.{left if alike else ''}"


def _lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
