"""`sage-grpo generate --bench NAME`: the clips that a public suite scores, of the base and of the tuned model from the same seeds.

`out/base` and `out/tuned` hold nothing but clips, because suites take every file of a folder for one. `out/bench.json` says what they
were made with; a second call goes on where the first one stopped, and is refused when it would mix clips of other settings with these.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.clips.generate import Clip, GenerateSpec, sample
from sage_grpo.data.benches import layout, read_lists, remark
from sage_grpo.data.prompts import load_prompts
from sage_grpo.documents import demand, read_object
from sage_grpo.inside import replace_text, replacing

if TYPE_CHECKING:
    from sage_grpo.folder.weights import Found

AT_ONCE = 1024
"""Clips whose prompts are encoded together: what is encoded stays in memory until they are sampled."""


def make(options: GenerateSpec, out: Path) -> Iterator[str]:
    """Make the clips that are not there yet; a sentence about those of the base, and then of the tuned model."""
    made = plan(options)
    clips, models = list(made), _models(options)
    record = _claim(out, options, made, models)
    for name, found in models.items():
        kept = {clip.file for clip in clips if _is_whole(out / name / clip.file, record["video"])}
        _make(options, found, out / name, [clip for clip in clips if clip.file not in kept], record, out)
        _check_names(out / name, clips)
        if options.bench == "videophy":
            _write_table(out / f"{name}.csv", out / name, made)
        yield f"{name}: {len(clips)} clips in {out / name}" + (f", {len(kept)} of them from before" if kept else "")


def plan(options: GenerateSpec) -> dict[Clip, str]:
    """Every clip of the suite and the prompt that it is named after. The first clip has the options' seed, the next ones the next; a list's own
    seeds win."""
    assert options.bench is not None
    entries = read_lists(options.prompts)
    told = remark(options.bench, entries)
    if told:
        print(told, file=sys.stderr)
    rewrites = None if options.rewrites is None else load_prompts(options.rewrites)
    clips, copies = dict[Clip, str](), dict[str, int]()
    for number, slot in enumerate(layout(options.bench, entries, rewrites)):
        own, key = slot.prompt.seed, f"{Path(slot.file).parent}/{slot.prompt.text}"
        copies[key] = copies.get(key, -1) + 1
        seed = options.seed + number if own is None else own + copies[key]
        clips[Clip(slot.text, slot.prompt.image, seed, slot.file)] = slot.prompt.text
    return clips


def _models(options: GenerateSpec) -> dict[str, Found]:
    models = {"base": options.base().find(options.model)}
    if options.tunes:
        models["tuned"] = options.find(options.model)
    return models


def _claim(out: Path, options: GenerateSpec, clips: Mapping[Clip, str], models: Mapping[str, Found]) -> dict[str, Any]:
    """What the clips of this folder are made with; refuses a folder of other clips."""
    from sage_grpo.effects import MEANING, affects
    from sage_grpo.folder.identity import differences, plain
    from sage_grpo.training.config import TrainConfig

    rows = [[clip.file, clip.prompt, clip.seed, _content(clip.image)] for clip in clips]
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
            **({} if clip.prompt == prompt else {"given": clip.prompt}),
        }
        for clip, prompt in clips.items()
    ]
    _write_record(out, record)
    return record


def _content(image: Path | None) -> str:
    """A fingerprint of a picture, wherever it lies; nothing where there is none."""
    return "" if image is None else hashlib.sha256(image.read_bytes()).hexdigest()


def _write_record(out: Path, record: Mapping[str, Any]) -> None:
    replace_text(out / "bench.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _print_of(found: Found) -> list[str]:
    """Fingerprints of the weights, wherever they lie."""
    from sage_grpo.folder.identity import of_base
    from sage_grpo.models.checkpoints.checkpoint import fingerprint

    start = None if found.spec.lora is None else found.spec.lora.path
    folders = [Path(folder) for folder in (start, found.lora, found.checkpoint) if folder is not None]
    return [of_base(found.spec), *(fingerprint(folder, [""]) for folder in folders), f"ema {found.ema}"]


def _make(
    options: GenerateSpec, found: Found, folder: Path, clips: Sequence[Clip], record: dict[str, Any], out: Path
) -> None:
    from sage_grpo.video import write_mp4

    if not clips:
        return
    model = found.load()
    video = model.video
    record["video"] = {"frames": video.frames, "height": video.height, "width": video.width}
    _write_record(out, record)
    for first in range(0, len(clips), AT_ONCE):
        for some, videos in sample(options, model, clips[first : first + AT_ONCE]):
            for clip, one in zip(some, videos):
                write_mp4(folder / clip.file, one, video.fps)
    del model
    gc.collect()  # the next model needs its memory


def _is_whole(file: Path, video: Mapping[str, int] | None) -> bool:
    from sage_grpo.video import video_size

    return video is not None and file.is_file() and video_size(file) == tuple(video.values())


def _check_names(folder: Path, clips: Sequence[Clip]) -> None:
    there = {file.relative_to(folder).as_posix() for file in folder.rglob("*.mp4")}
    lost = [clip.file for clip in clips if clip.file not in there]
    if lost:
        raise ValueError(
            f"{len(lost)} clips are not in {folder} under their names, such as {lost[0]!r}: this file system does not keep names as they are "
            "(upper and lower case?). Choose an --out on another one."
        )


def _write_table(file: Path, folder: Path, clips: Mapping[Clip, str]) -> None:
    """VideoPhy's judge reads a table of files and captions."""
    with replacing(file) as fresh, fresh.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["videopath", "caption"])
        table.writerows([str((folder / clip.file).resolve()), prompt] for clip, prompt in clips.items())
