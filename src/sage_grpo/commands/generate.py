"""Prompts to mp4 files and a contact sheet, with any kernel, LoRA or checkpoint.

`--run DIR` takes the model of a run as it was trained (checkpoint, sizes, fps, guidance, shift, dtype) with any of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sage_grpo.clips.generate import GenerateSpec, clips_of, sample
from sage_grpo.commands.starting import say_whose_model, trusted
from sage_grpo.configure import given
from sage_grpo.folder.saved import refuse_own
from sage_grpo.ranges import Folder


@dataclass(frozen=True, kw_only=True)
class Options(GenerateSpec):
    """What to generate, and where to."""

    out: Folder = "outputs"
    """Folder for the files."""


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

    clips, videos = clips_of(options), []
    if options.run is not None:
        refuse_own(out, Path(options.run))
    model = options.find(options.model).load()
    for some, batch, sound in sample(options, model, clips):
        for place, (clip, video) in enumerate(zip(some, batch)):
            write_mp4(out / clip.file, video, model.video.fps, sound=None if sound is None else sound[place])
            videos.append(video)
    sheet = contact_sheet(out / "contact_sheet.png", videos, [clip.prompt for clip in clips])
    print(f"{len(clips)} clips and {sheet.name} in {out}")
    return 0
