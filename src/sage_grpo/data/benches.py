"""Where public suites look for the clips that they score: how many clips of a prompt, in which folder, under which name.

The facts are from the suites' own instructions (docs/bench-export.md). Their prompts are not here: a user has the suite's list as a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from sage_grpo.data.prompts import SETS, SUFFIXES, Prompt, load_prompts
from sage_grpo.documents import shown
from sage_grpo.hints import did_you_mean

BenchName = Literal["vbench", "vbench2", "evalcrafter", "t2v_compbench", "phygenbench", "videophy"]
FLICKER = "temporal_flickering"
"""The dimension of VBench for which still clips are left out afterwards, so that it takes 25 clips of a prompt."""
VBENCH2 = (
    "Camera_Motion", "Complex_Landscape", "Complex_Plot", "Composition", "Diversity", "Dynamic_Attribute",
    "Dynamic_Spatial_Relationship", "Human_Anatomy", "Human_Clothes", "Human_Identity", "Human_Interaction",
    "Instance_Preservation", "Material", "Mechanics", "Motion_Order_Understanding", "Motion_Rationality",
    "Multi-View_Consistency", "Thermotics",
)  # fmt: skip
LONGEST_NAME = 250
"""Bytes of a file name: 255, less those of the name under which a file is written until it is whole."""


@dataclass(frozen=True)
class Slot:
    """A clip that a suite looks for."""

    prompt: Prompt
    text: str
    """What the model is given: the prompt, or what a user has rewritten it to."""
    file: str
    """Its place in the folder of a model."""


@dataclass(frozen=True)
class Entry:
    """A prompt and its place in a list."""

    prompt: Prompt
    number: int
    """From 0, in its file."""
    source: str
    """Name of the file without its suffix."""

    @property
    def dimensions(self) -> tuple[str, ...]:
        """What the suite measures on it, where the list says so."""
        given = self.prompt.metadata.get("dimension") or ()
        names = (given,) if isinstance(given, str) else given
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"{self.source}: the dimension of {self.prompt.text[:60]!r} must be a name or a list of names, got {shown(given)}."
            )
        return tuple(names)


def read_lists(given: str | Sequence[str]) -> list[Entry]:
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
    return [
        Entry(prompt, number, Path(file).stem) for file in files for number, prompt in enumerate(load_prompts(file))
    ]


def layout(bench: BenchName, entries: Sequence[Entry], rewrites: Sequence[Prompt] | None = None) -> list[Slot]:
    """Every clip that the suite wants, once; prompts that cannot be the name of a file are refused unless the suite says how."""
    if bench not in SEVERAL and len({entry.source for entry in entries}) > 1:
        raise ValueError(f"{bench} numbers its clips by one list: give --prompts one file.")
    if rewrites is not None and len(rewrites) != len(entries):
        raise ValueError(
            f"{len(rewrites)} rewritten prompts for {len(entries)} prompts: give one a line, in the same order."
        )
    slots: dict[str, Slot] = {}
    for place, entry in enumerate(entries):
        text = entry.prompt.text if rewrites is None else rewrites[place].text
        for file in NAMES[bench](entry):
            _check(bench, file, entry.prompt)
            known = slots.setdefault("/".join(file), Slot(entry.prompt, text, "/".join(file)))
            if known.prompt.text != entry.prompt.text:
                raise ValueError(
                    f"{bench}: two prompts have one file name, {known.file!r}: {known.prompt.text!r} and {entry.prompt.text!r}. "
                    "Take one of them out."
                )
    return list(slots.values())


def remark(bench: BenchName, entries: Sequence[Entry]) -> str:
    """What a list cannot tell and a user should know; else nothing."""
    if bench != "vbench" or any(entry.dimensions or entry.source == FLICKER for entry in entries):
        return ""
    return (
        f"This list does not say what each prompt is for: 5 clips of every one. For {FLICKER} VBench wants 25: give "
        f"--prompts VBench_full_info.json, or {FLICKER}.txt."
    )


def _vbench(entry: Entry) -> Iterator[tuple[str, ...]]:
    for index in range(25 if FLICKER in (entry.source, *entry.dimensions) else 5):
        yield (f"{entry.prompt.text}-{index}.mp4",)


def _vbench2(entry: Entry) -> Iterator[tuple[str, ...]]:
    dimensions = entry.dimensions or (entry.source,)
    for dimension in dimensions:
        if dimension not in VBENCH2:
            raise ValueError(
                f"VBench-2.0 has no dimension {dimension!r}: give --prompts VBench2_full_info.json, or lists named after their dimension "
                f"(Diversity.txt).{did_you_mean(dimension, VBENCH2)}"
            )
        for index in range(20 if dimension == "Diversity" else 3):
            yield dimension, f"{entry.prompt.text[:180]}-{index}.mp4"


def _evalcrafter(entry: Entry) -> Iterator[tuple[str, ...]]:
    yield (f"{entry.prompt.metadata.get('id', f'{entry.number:04d}')}.mp4",)


def _t2v_compbench(entry: Entry) -> Iterator[tuple[str, ...]]:
    yield re.sub(r"^\d+_", "", entry.source), f"{entry.number + 1:04d}.mp4"


def _phygenbench(entry: Entry) -> Iterator[tuple[str, ...]]:
    yield (f"output_video_{entry.number + 1}.mp4",)


def _videophy(entry: Entry) -> Iterator[tuple[str, ...]]:
    yield (f"{entry.number + 1:04d}.mp4",)


NAMES: dict[str, Callable[[Entry], Iterator[tuple[str, ...]]]] = {
    "vbench": _vbench,
    "vbench2": _vbench2,
    "evalcrafter": _evalcrafter,
    "t2v_compbench": _t2v_compbench,
    "phygenbench": _phygenbench,
    "videophy": _videophy,
}
SEVERAL = ("vbench", "vbench2", "t2v_compbench")
"""Suites whose prompts come in several lists."""


def _check(bench: str, file: tuple[str, ...], prompt: Prompt) -> None:
    for name in file:
        wrong = next((f"it has {sign!r}" for sign in name if sign in "/\\" or not sign.isprintable()), "")
        if not wrong and (PurePosixPath(name).name != name or len(name.encode()) > LONGEST_NAME):
            wrong = f"a name has at most {LONGEST_NAME} bytes, this one {len(name.encode())}"
        if wrong:
            raise ValueError(
                f"{bench} wants a file {name[:LONGEST_NAME]!r} for the prompt {prompt.text[:LONGEST_NAME]!r}, which cannot be: {wrong}. The suite does not say what to write "
                "instead; take the prompt out of the list."
            )
