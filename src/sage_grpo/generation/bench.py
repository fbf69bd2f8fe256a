"""`sage-grpo generate --bench NAME`: the clips that VBench scores, under the names that it looks for (docs/bench-export.md).

A folder contains nothing but clips, because suites take every file of it for one; a second call makes those that are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sage_grpo.data.prompts import load_prompts
from sage_grpo.generation.generate import ClipRequest, GenerateSpec, sample
from sage_grpo.types import VideoSpec
from sage_grpo.utils.suggest import did_you_mean
from sage_grpo.utils.video import video_format, write_mp4

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


def make(options: GenerateSpec, out: Path) -> str:
    clips = clips_of(options)
    model = options.find(options.model).load()
    missing = [clip for clip in clips if not _is_whole(out / clip.file, model.video)]
    for first in range(0, len(missing), AT_ONCE):
        for some, videos, sound in sample(options, model, missing[first : first + AT_ONCE]):
            for place, (clip, one) in enumerate(zip(some, videos)):
                write_mp4(out / clip.file, one, model.video.fps, sound=None if sound is None else sound[place])
    kept = len(clips) - len(missing)
    return f"{len(clips)} clips in {out}" + (f", {kept} of them from before" if kept else "")


def _is_whole(file: Path, video: VideoSpec) -> bool:
    """True for a clip of this size; its header is written last."""
    try:
        return file.is_file() and replace(video_format(file), fps=video.fps) == video
    except ValueError:
        return False


def clips_of(options: GenerateSpec) -> list[ClipRequest]:
    """Every clip of the suite, once. The first clip has the seed, the next ones the next; a list's own seeds win."""
    lists = [options.prompts] if isinstance(options.prompts, str) else options.prompts
    prompts = [(Path(file).stem, prompt) for file in lists for prompt in load_prompts(file)]
    rewrites = None if options.rewrites is None else load_prompts(options.rewrites)
    if rewrites is not None and len(rewrites) != len(prompts):
        raise ValueError(
            f"{len(rewrites)} rewritten prompts for {len(prompts)} prompts: give one a line, in the same order."
        )
    files = _vbench if options.bench == "vbench" else _vbench2
    clips: dict[str, tuple[str, ClipRequest]] = {}  # by file, each with its prompt in the list
    copies = Counter[tuple[str, str]]()
    for place, (source, listed) in enumerate(prompts):
        prompt = listed if rewrites is None else replace(listed, text=rewrites[place].text)
        given = listed.metadata.get("dimension") or []
        for folder, name in files(listed.text, source, given if isinstance(given, list) else [given]):
            _check(name, listed.text)
            file = f"{folder}{name}"
            if file not in clips:
                own = listed.seed
                seed = options.seed + len(clips) if own is None else own + copies[folder, listed.text]
                clips[file] = listed.text, ClipRequest(prompt, seed, file)
                copies[folder, listed.text] += 1
            elif clips[file][0] != listed.text:
                raise ValueError(
                    f"Two prompts have one file name, {file!r}: {clips[file][0]!r} and {listed.text!r}. Take one of them out."
                )
    return [clip for _, clip in clips.values()]


def _vbench(text: str, source: str, dimensions: Sequence[object]) -> Iterator[tuple[str, str]]:
    for index in range(25 if FLICKER in (source, *dimensions) else 5):
        yield "", f"{text}-{index}.mp4"


def _vbench2(text: str, source: str, dimensions: Sequence[object]) -> Iterator[tuple[str, str]]:
    for dimension in dimensions or (source,):
        if dimension not in VBENCH2:
            raise ValueError(
                f"VBench-2.0 has no dimension {dimension!r}: give --prompts VBench2_full_info.json, or lists named after their dimension "
                f"(Diversity.txt).{did_you_mean(str(dimension), VBENCH2)}"
            )
        for index in range(20 if dimension == "Diversity" else 3):
            yield f"{dimension}/", f"{text[:180]}-{index}.mp4"


def _check(name: str, prompt: str) -> None:
    wrong = next((f"it has {sign!r}" for sign in name if sign in "/\\" or not sign.isprintable()), "")
    if not wrong and len(name.encode()) > LONGEST_NAME:
        wrong = f"a name has at most {LONGEST_NAME} bytes, this one {len(name.encode())}"
    if wrong:
        raise ValueError(
            f"The suite wants a file {name[:LONGEST_NAME]!r} for the prompt {prompt[:LONGEST_NAME]!r}, which cannot be: {wrong}. The suite "
            "does not say what to write instead; take the prompt out of the list."
        )
