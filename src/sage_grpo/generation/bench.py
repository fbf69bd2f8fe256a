"""`sage-grpo generate --bench NAME`: the clips that a public suite scores, of the base and of the tuned model from the
same seeds.

The number of clips per prompt, their folders and names follow the suite's own instructions (docs/bench-export.md); its
prompts are not included, a user has the suite's list as a file. `out/base` and `out/tuned` contain nothing but clips,
because suites take every file of a folder for one. `out/bench.json` records their settings; a second call continues the
first one, and is refused if its settings differ.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from sage_grpo.data.prompts import SETS, SUFFIXES, Prompt, load_prompts
from sage_grpo.generation.generate import BenchName, ClipRequest, GenerateSpec, sample
from sage_grpo.utils.json_schema import demand, read_object, shown
from sage_grpo.utils.safe_io import replace_text, replacing
from sage_grpo.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from sage_grpo.run.saved import Weights

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


@dataclass(frozen=True)
class Slot:
    """A clip that a suite expects."""

    prompt: Prompt
    text: str
    """Prompt for the model: the list's, or a user's rewrite of it."""
    file: str
    """Path in the folder of a model."""


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt and its place in a list."""

    prompt: Prompt
    number: int
    """From 0, in its file."""
    source: str
    """Name of the file without its suffix."""

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
    return [
        BenchPrompt(prompt, number, Path(file).stem)
        for file in files
        for number, prompt in enumerate(load_prompts(file))
    ]


def layout(bench: BenchName, entries: Sequence[BenchPrompt], rewrites: Sequence[Prompt] | None = None) -> list[Slot]:
    """Every clip of the suite, once; refuses prompts that cannot be a file name unless the suite has a rule."""
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


def remark(bench: BenchName, entries: Sequence[BenchPrompt]) -> str:
    """A remark on information that the list lacks, or an empty string."""
    if bench != "vbench" or any(entry.dimensions or entry.source == FLICKER for entry in entries):
        return ""
    return (
        f"This list does not say what each prompt is for: 5 clips of every one. For {FLICKER} VBench wants 25: give "
        f"--prompts VBench_full_info.json, or {FLICKER}.txt."
    )


def _vbench(entry: BenchPrompt) -> Iterator[tuple[str, ...]]:
    for index in range(25 if FLICKER in (entry.source, *entry.dimensions) else 5):
        yield (f"{entry.prompt.text}-{index}.mp4",)


def _vbench2(entry: BenchPrompt) -> Iterator[tuple[str, ...]]:
    dimensions = entry.dimensions or (entry.source,)
    for dimension in dimensions:
        if dimension not in VBENCH2:
            raise ValueError(
                f"VBench-2.0 has no dimension {dimension!r}: give --prompts VBench2_full_info.json, or lists named after their dimension "
                f"(Diversity.txt).{did_you_mean(dimension, VBENCH2)}"
            )
        for index in range(20 if dimension == "Diversity" else 3):
            yield dimension, f"{entry.prompt.text[:180]}-{index}.mp4"


NAMES: dict[str, Callable[[BenchPrompt], Iterable[tuple[str, ...]]]] = {
    "vbench": _vbench,
    "vbench2": _vbench2,
    "evalcrafter": lambda entry: [(f"{entry.prompt.metadata.get('id', f'{entry.number:04d}')}.mp4",)],
    "t2v_compbench": lambda entry: [(re.sub(r"^\d+_", "", entry.source), f"{entry.number + 1:04d}.mp4")],
    "phygenbench": lambda entry: [(f"output_video_{entry.number + 1}.mp4",)],
    "videophy": lambda entry: [(f"{entry.number + 1:04d}.mp4",)],
}
"""Folder and file name of every clip of a prompt, by suite."""
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


AT_ONCE = 1024
"""Clips whose prompts are encoded together: encodings stay in memory until they are sampled."""


def make(options: GenerateSpec, out: Path) -> Iterator[str]:
    """Generate the missing clips; yields a sentence on those of the base, and then of the tuned model."""
    made = clips_of(options)
    clips, models = list(made), _models(options)
    record = _claim(out, options, made, models)
    for name, found in models.items():
        kept = {clip.file for clip in clips if _is_whole(out / name / clip.file, record["video"])}
        _make(options, found, out / name, [clip for clip in clips if clip.file not in kept], record, out)
        _check_names(out / name, clips)
        if options.bench == "videophy":
            _write_table(out / f"{name}.csv", out / name, made)
        yield f"{name}: {len(clips)} clips in {out / name}" + (f", {len(kept)} of them from before" if kept else "")


def clips_of(options: GenerateSpec) -> dict[ClipRequest, str]:
    """Every clip of the suite and its prompt in the list. The first clip has the options' seed, the next ones the next;
    a list's own seeds win."""
    assert options.bench is not None
    entries = read_lists(options.prompts)
    told = remark(options.bench, entries)
    if told:
        print(told, file=sys.stderr)
    rewrites = None if options.rewrites is None else load_prompts(options.rewrites)
    clips, copies = dict[ClipRequest, str](), dict[str, int]()
    for number, slot in enumerate(layout(options.bench, entries, rewrites)):
        own, key = slot.prompt.seed, f"{Path(slot.file).parent}/{slot.prompt.text}"
        copies[key] = copies.get(key, -1) + 1
        seed = options.seed + number if own is None else own + copies[key]
        clips[ClipRequest(dataclasses.replace(slot.prompt, text=slot.text), seed, slot.file)] = slot.prompt.text
    return clips


def _models(options: GenerateSpec) -> dict[str, Weights]:
    models = {"base": options.base().find(options.model)}
    if options.tunes:
        models["tuned"] = options.find(options.model)
    return models


def _claim(
    out: Path, options: GenerateSpec, clips: Mapping[ClipRequest, str], models: Mapping[str, Weights]
) -> dict[str, Any]:
    """Record the settings of the clips in this folder; refuses a folder with clips of other settings."""
    from sage_grpo.config.metadata import MEANING, affects
    from sage_grpo.run.identity import differences, plain
    from sage_grpo.training.config import TrainConfig

    images = {
        clip: "/".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in clip.prompt.files) for clip in clips
    }
    # Contents of images, independent of their location.
    rows = [[clip.file, clip.prompt.text, clip.seed, images[clip]] for clip in clips]
    names = ("bench", "kernel", "solver", "steps", "deterministic_last", "model")
    settings = {
        **{name: plain(value) for name, value in dataclasses.asdict(options).items() if name in names},
        "prompts": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "weights": {name: _print_of(found) for name, found in models.items()},
    }
    record: dict[str, Any] = {"video": None, "settings": settings}
    file = out / "bench.json"
    if file.is_file():
        old = read_object(file)
        demand(old, {"settings": dict, "video": (dict, type(None))}, str(file))
        demand(old["settings"], {"weights": dict}, f"{file}: settings")
        different = differences(old["settings"], settings)
        changed = {key: pair for key, pair in different.items() if affects(TrainConfig, key) in MEANING}
        if changed:
            lines = "".join(f"\n  {key}: {was!r} -> {now!r}" for key, (was, now) in changed.items())
            raise ValueError(f"{out} holds clips that were made with other settings:{lines}\nChoose another --out.")
        settings["weights"] = {**old["settings"]["weights"], **settings["weights"]}
        record["video"] = old["video"]
    record["clips"] = [
        {
            "file": clip.file,
            "prompt": prompt,
            "seed": clip.seed,
            **({} if clip.prompt.text == prompt else {"given": clip.prompt.text}),
        }
        for clip, prompt in clips.items()
    ]
    _write_record(out, record)
    return record


def _write_record(out: Path, record: Mapping[str, Any]) -> None:
    replace_text(out / "bench.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _print_of(found: Weights) -> list[str]:
    """Fingerprints of the weights, independent of their location."""
    from sage_grpo.models.checkpoints.checkpoint import fingerprint
    from sage_grpo.run.identity import of_base

    start = None if found.spec.lora is None else found.spec.lora.path
    folders = [Path(folder) for folder in (start, found.lora, found.checkpoint) if folder is not None]
    return [of_base(found.spec), *(fingerprint(folder, [""]) for folder in folders), f"ema {found.ema}"]


def _make(
    options: GenerateSpec, found: Weights, folder: Path, clips: Sequence[ClipRequest], record: dict[str, Any], out: Path
) -> None:
    from sage_grpo.utils.video import write_mp4

    if not clips:
        return
    model = found.load()
    video = model.video
    record["video"] = {"frames": video.frames, "height": video.height, "width": video.width}
    _write_record(out, record)
    for first in range(0, len(clips), AT_ONCE):
        for some, videos, sound in sample(options, model, clips[first : first + AT_ONCE]):
            for place, (clip, one) in enumerate(zip(some, videos)):
                write_mp4(folder / clip.file, one, video.fps, sound=None if sound is None else sound[place])
    del model
    gc.collect()  # the next model needs its memory


def _is_whole(file: Path, video: Mapping[str, int] | None) -> bool:
    from sage_grpo.utils.video import video_size

    return video is not None and file.is_file() and video_size(file) == tuple(video.values())


def _check_names(folder: Path, clips: Sequence[ClipRequest]) -> None:
    there = {file.relative_to(folder).as_posix() for file in folder.rglob("*.mp4")}
    lost = [clip.file for clip in clips if clip.file not in there]
    if lost:
        raise ValueError(
            f"{len(lost)} clips are not in {folder} under their names, such as {lost[0]!r}: this file system does not keep names as they are "
            "(upper and lower case?). Choose an --out on another one."
        )


def _write_table(file: Path, folder: Path, clips: Mapping[ClipRequest, str]) -> None:
    """Write the table of files and captions that VideoPhy's judge reads."""
    with replacing(file) as fresh, fresh.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["videopath", "caption"])
        table.writerows([str((folder / clip.file).resolve()), prompt] for clip, prompt in clips.items())
