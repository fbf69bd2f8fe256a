"""Prompts to mp4 files and a contact sheet, with any kernel, LoRA or checkpoint.

`--run DIR` takes the model of a run as it was trained (checkpoint, sizes, fps, guidance, shift, dtype) with any of its weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sage_grpo.clips.generate import GenerateSpec, clips_of, prompts_of, sample
from sage_grpo.commands.starting import say_whose_model, trusted
from sage_grpo.configure import given
from sage_grpo.folder.saved import refuse_own
from sage_grpo.inside import replace_text
from sage_grpo.ranges import Count, Folder
from sage_grpo.rewards.spec import RewardSpec

if TYPE_CHECKING:
    import torch

    from sage_grpo.clips.generate import Clip
    from sage_grpo.data.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class Options(GenerateSpec):
    """What to generate, and where to."""

    out: Folder = "outputs"
    """Folder for the files."""
    first: Count | None = None
    """Only the first so many prompts of a list; None takes all."""
    rewards: list[RewardSpec] = field(default_factory=list)
    """Score the clips with these, and write pairs.jsonl for data.clips: of every prompt the best clip and the worst (docs/preferences.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rewards and (self.bench is not None or self.per_prompt < 2):
            raise ValueError(
                "--rewards makes pairs of the clips of a prompt: set --per_prompt to 2 or more, and leave --bench out."
            )
        if self.rewards and not any(reward.counts for reward in self.rewards):
            raise ValueError(
                "--rewards: none of them has a weight, so that no clip is better than another. Give one a weight."
            )


def defaults(argv: list[str]) -> tuple[Options | None, list[str]]:
    """What the options start from: a run's model where the words name a run."""
    run = given(argv, "run")
    return None if run is None else Options.of_run(run, trust=trusted(argv)), argv


def run(options: Options) -> int:
    """Generate and write; returns the exit status."""
    out = Path(options.out)
    say_whose_model(options)
    if options.bench is not None:
        from sage_grpo.clips import bench

        for made in bench.make(options, out):
            print(made)
        return 0
    from sage_grpo.video import contact_sheet, write_mp4

    prompts = prompts_of(options)[: options.first]
    clips, videos = clips_of(options, prompts), []
    if options.run is not None:
        refuse_own(out, Path(options.run))
    if options.rewards:
        _refuse_others(out, clips)
    model = options.find(options.model).load()
    for some, batch, sound in sample(options, model, clips):
        for place, (clip, video) in enumerate(zip(some, batch)):
            write_mp4(out / clip.file, video, model.video.fps, sound=None if sound is None else sound[place])
            videos.append(video)
    if options.rewards:
        print(_pairs(options, out, clips, prompts, model.device))
        return 0
    sheet = contact_sheet(out / "contact_sheet.png", videos, [clip.prompt.text for clip in clips])
    print(f"{len(clips)} clips and {sheet.name} in {out}")
    return 0


def _refuse_others(out: Path, clips: Sequence[Clip]) -> None:
    """What is in the folder already has no prompt here, and would be scored with the clips."""
    from sage_grpo.clips.files import SUFFIXES

    ours = {out / clip.file for clip in clips}
    others = [file for file in sorted(out.rglob("*")) if file.suffix.lower() in SUFFIXES and file not in ours]
    if others:
        raise ValueError(
            f"--rewards scores the clips of --out, which has others already ({others[0]}): name a new folder."
        )


def _pairs(options: Options, out: Path, clips: Sequence[Clip], prompts: Sequence[Prompt], device: torch.device) -> str:
    """Score the files as they were written, for they are what will be learned; write which are best and worst; a sentence for people."""
    from sage_grpo.clips.files import best_and_worst, refuse_unscored, score_videos
    from sage_grpo.data.examples import LISTS

    told = [
        {**prompts[place // options.per_prompt].metadata, **clip.images, "prompt": clip.prompt.text, "video": clip.file}
        for place, clip in enumerate(clips)
    ]
    replace_text(out / "prompts.jsonl", _lines(told))
    rows = score_videos(
        out, out / "prompts.jsonl", options.rewards, output=out, device=device, batch_size=options.batch
    )
    refuse_unscored(out, rows)
    found = best_and_worst(rows)
    replace_text(out / LISTS[0], _lines(found))
    alike = len({row.prompt for row in rows}) - len(found)
    left = (
        f" {alike} prompts are left out: fewer than two of their clips have a score, or all have the same."
        if alike
        else ""
    )
    return f"{len(clips)} clips, their scores and {len(found)} pairs ({LISTS[0]}) in {out}.{left}"


def _lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
