"""`sage-grpo generate --bench NAME`: the clips that VBench scores, under the names that it looks for.

The number of clips per prompt, their folders and names follow the suite's own instructions (docs/bench-export.md); a user has its prompts as a
file. A folder contains nothing but clips, because suites take every file of it for one; a second call makes those that are missing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sage_grpo.data.prompts import SETS, SUFFIXES, Prompt, load_prompts
from sage_grpo.generation.generate import BenchName, ClipRequest, GenerateSpec, sample
from sage_grpo.types import VideoSpec
from sage_grpo.utils.json_schema import shown
from sage_grpo.utils.suggest import did_you_mean

FLICKER = "temporal_flickering"
"""The dimension of VBench that drops still clips afterwards, and therefore takes 25 clips of a prompt."""
VBENCH2 = (
    "Camera_Motion", "Complex_Landscape", "Complex_Plot", "Composition", "Diversity", "Dynamic_Attribute",
    "Dynamic_Spatial_Relationship", "Human_Anatomy", "Human_Clothes", "Human_Identity", "Human_Interaction",
    "Instance_Preservation", "Material", "Mechanics", "Motion_Order_Understanding", "Motion_Rationality",
    "Multi-View_Consistency", "Thermotics",
)  # fmt: skip
LONGEST_NAME = 250
"""Longest file name in bytes: 255, less those of the temporary name while it is written."""
AT_ONCE = 1024
"""Clips whose prompts are encoded together: encodings stay in memory until they are sampled."""


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt of a list."""

    prompt: Prompt
    source: str
    """Name of the list's file without its suffix."""

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Dimensions that the suite measures on it, if the list names them."""
        given = self.prompt.metadata.get("dimension") or ()
        names = (given,) if isinstance(given, str) else given
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"{self.source}: the dimension of {self.prompt.text[:60]!r} must be a name or a list of names, got {shown(given)}."
            )
        return tuple(names)


def make(options: GenerateSpec, out: Path) -> str:
    """Generate the missing clips; returns a sentence on all of them."""
    from sage_grpo.utils.video import write_mp4

    clips = clips_of(options)
    model = options.find(options.model).load()
    video = model.video
    missing = [clip for clip in clips if not _is_whole(out / clip.file, video)]
    for first in range(0, len(missing), AT_ONCE):
        for some, videos, sound in sample(options, model, missing[first : first + AT_ONCE]):
            for place, (clip, one) in enumerate(zip(some, videos)):
                write_mp4(out / clip.file, one, video.fps, sound=None if sound is None else sound[place])
    present = {file.relative_to(out).as_posix() for file in out.rglob("*.mp4")}
    lost = [clip.file for clip in clips if clip.file not in present]
    if lost:
        raise ValueError(
            f"{len(lost)} clips are not in {out} under their names, such as {lost[0]!r}: this file system does not keep names as they are "
            "(upper and lower case?). Choose an --out on another one."
        )
    kept = len(clips) - len(missing)
    return f"{len(clips)} clips in {out}" + (f", {kept} of them from before" if kept else "")


def _is_whole(file: Path, video: VideoSpec) -> bool:
    """True for a clip of this size; its header is written last."""
    from sage_grpo.utils.video import video_format

    try:
        return file.is_file() and replace(video_format(file), fps=video.fps) == video
    except ValueError:
        return False


def clips_of(options: GenerateSpec) -> list[ClipRequest]:
    assert options.bench is not None
    entries = read_lists(options.prompts)
    lacking = remark(options.bench, entries)
    if lacking:
        print(lacking, file=sys.stderr)
    rewrites = None if options.rewrites is None else load_prompts(options.rewrites)
    return layout(options.bench, entries, rewrites, options.seed)


def read_lists(given: str | Sequence[str]) -> list[BenchPrompt]:
    """The prompts of a list, of several, or of all in a folder."""
    files: list[str | Path] = []
    for name in [given] if isinstance(given, str) else given:
        folder = Path(name)
        if folder.is_dir():
            files += sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
        elif name in SETS or folder.suffix in SUFFIXES:
            files.append(name)
        else:
            raise ValueError(
                f"--bench needs the suite's list as a file ({', '.join(SUFFIXES)}) or a folder of them, got --prompts {name!r}."
                + did_you_mean(name, SETS)
            )
    if not files:
        raise ValueError(f"There is no list of prompts in {given!r}: give --prompts FILE with the suite's prompts.")
    return [BenchPrompt(prompt, Path(file).stem) for file in files for prompt in load_prompts(file)]


def layout(
    bench: BenchName, entries: Sequence[BenchPrompt], rewrites: Sequence[Prompt] | None = None, seed: int = 0
) -> list[ClipRequest]:
    """Every clip of the suite, once. The first clip has the seed, the next ones the next; a list's own seeds win."""
    if rewrites is not None and len(rewrites) != len(entries):
        raise ValueError(
            f"{len(rewrites)} rewritten prompts for {len(entries)} prompts: give one a line, in the same order."
        )
    clips: dict[str, tuple[str, ClipRequest]] = {}  # by file, each with its prompt in the list
    copies = Counter[tuple[str, str]]()
    for place, entry in enumerate(entries):
        text, listed = entry.prompt.text, entry.prompt.seed
        prompt = entry.prompt if rewrites is None else replace(entry.prompt, text=rewrites[place].text)
        for folder, name in _vbench(entry) if bench == "vbench" else _vbench2(entry):
            _check(bench, name, text)
            file = f"{folder}{name}"
            if file not in clips:
                number = seed + len(clips) if listed is None else listed + copies[folder, text]
                clips[file] = text, ClipRequest(prompt, number, file)
                copies[folder, text] += 1
            elif clips[file][0] != text:
                raise ValueError(
                    f"{bench}: two prompts have one file name, {file!r}: {clips[file][0]!r} and {text!r}. Take one of them out."
                )
    return [clip for _, clip in clips.values()]


def _vbench(entry: BenchPrompt) -> Iterator[tuple[str, str]]:
    for index in range(25 if FLICKER in (entry.source, *entry.dimensions) else 5):
        yield "", f"{entry.prompt.text}-{index}.mp4"


def _vbench2(entry: BenchPrompt) -> Iterator[tuple[str, str]]:
    for dimension in entry.dimensions or (entry.source,):
        if dimension not in VBENCH2:
            raise ValueError(
                f"VBench-2.0 has no dimension {dimension!r}: give --prompts VBench2_full_info.json, or lists named after their dimension "
                f"(Diversity.txt).{did_you_mean(dimension, VBENCH2)}"
            )
        for index in range(20 if dimension == "Diversity" else 3):
            yield f"{dimension}/", f"{entry.prompt.text[:180]}-{index}.mp4"


def _check(bench: str, name: str, prompt: str) -> None:
    wrong = next((f"it has {sign!r}" for sign in name if sign in "/\\" or not sign.isprintable()), "")
    if not wrong and len(name.encode()) > LONGEST_NAME:
        wrong = f"a name has at most {LONGEST_NAME} bytes, this one {len(name.encode())}"
    if wrong:
        raise ValueError(
            f"{bench} wants a file {name[:LONGEST_NAME]!r} for the prompt {prompt[:LONGEST_NAME]!r}, which cannot be: {wrong}. The suite does "
            "not say what to write instead; take the prompt out of the list."
        )


def remark(bench: BenchName, entries: Sequence[BenchPrompt]) -> str:
    """A remark on information that the list lacks, or an empty string."""
    if bench != "vbench" or any(entry.dimensions or entry.source == FLICKER for entry in entries):
        return ""
    return (
        f"This list does not say what each prompt is for: 5 clips of every one. For {FLICKER} VBench wants 25: give "
        f"--prompts VBench_full_info.json, or {FLICKER}.txt."
    )
