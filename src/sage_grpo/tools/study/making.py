"""A new study: its videos are found, checked and copied under names that reveal nothing, its database is written, and the folder appears
when all is done.

Copies hold pictures and sound alone: no title, comment or date of the original. They all carry the same time stamp.
Later changes of the folders do not change the study, and the server has one folder to serve from.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sage_grpo.data.prompts import Prompt
from sage_grpo.tools.study.pairs import Shown, check_count, comparisons, deal, spoilt_pool
from sage_grpo.tools.study.store import Store, Study, StudyError
from sage_grpo.utils.safe_io import inside
from sage_grpo.utils.suggest import did_you_mean

DATABASE, CLIPS = "study.sqlite", "clips"
DIMENSIONS = {
    "visual quality": "Which video looks better? Think of sharpness, colors, and things that look wrong.",
    "motion quality": "Which video moves better? Think of smooth, natural and steady motion.",
    "semantic alignment": "Which video fits the text better?",
}
"""The dimensions of the paper's user study."""
LONGEST_NAME, LONGEST_PROMPT = 80, 8000
SUFFIXES = (".mp4", ".webm")
PLAYED = {".mp4": ("h264", "vp9", "av1"), ".webm": ("vp8", "vp9", "av1")}
HEARD = {".mp4": ("aac", "mp3"), ".webm": ("opus", "vorbis")}
"""Codecs of all browsers, for pictures and sounds."""
NAMED_AT_ONCE = 10


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """The inputs of a study."""

    title: str
    methods: Mapping[str, Path]
    prompts: Sequence[Prompt]
    dimensions: Mapping[str, str] = field(default_factory=lambda: dict(DIMENSIONS))
    against: str | None = None
    checks: float = 0.1
    max_failed: float = 0.25
    seed: int | None = None


def make(folder: Path, plan: StudyPlan) -> tuple[str, list[str]]:
    """Make a study in a new folder; returns the token of its results, and notes for its owner."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StudyError(f"{folder} is there already: choose another --study, a study is never overwritten.")
    _check(plan)
    found = find_clips(plan.methods, plan.prompts)
    study = _design(plan)
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    try:
        (partial / CLIPS).mkdir(parents=True)
        clips, notes = _copy(found, study, partial / CLIPS)
        store, token = Store.create(partial / DATABASE, study, clips)
        store.close()
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return token, notes


def _check(plan: StudyPlan) -> None:
    if len(plan.methods) < 2:
        raise StudyError(f"A study compares two methods or more, got {', '.join(plan.methods) or 'none'}.")
    places: dict[Path, str] = {}
    for name, folder in plan.methods.items():
        other = places.setdefault(folder.resolve(), name)
        if other != name:
            raise StudyError(
                f"Methods {other!r} and {name!r} are one folder, {folder}: raters would compare clips with themselves. Give each its own."
            )
    if not plan.dimensions:
        raise StudyError("A study needs at least one dimension: --dimensions '{name: question}'.")
    for name in (*plan.methods, *plan.dimensions):
        if not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
            raise StudyError(f"{name[:100]!r} is not a name: 1 to {LONGEST_NAME} printable characters.")
    for place, prompt in enumerate(plan.prompts):
        if len(prompt.text) > LONGEST_PROMPT:
            raise StudyError(f"Prompt {place + 1} has {len(prompt.text)} characters, more than {LONGEST_PROMPT}.")
    if plan.against is not None and plan.against not in plan.methods:
        raise StudyError(f"against: there is no method {plan.against!r}.{did_you_mean(plan.against, plan.methods)}")


def _design(plan: StudyPlan) -> Study:
    seed = secrets.randbits(32) if plan.seed is None else plan.seed
    methods, prompts = list(plan.methods), [prompt.text for prompt in plan.prompts]
    against = None if plan.against is None else methods.index(plan.against)
    checks = check_count(plan.checks, len(comparisons(len(prompts), len(methods), against)))
    return Study(
        title=plan.title,
        methods=methods,
        prompts=prompts,
        dimensions=dict(plan.dimensions),
        against=against,
        checks=checks,
        max_failed=plan.max_failed,
        pool=spoilt_pool(checks, len(prompts), len(methods), random.Random(f"{seed} pool")),
        seed=seed,
    )


def _copy(
    files: Mapping[str, Sequence[Path]], study: Study, folder: Path
) -> tuple[dict[tuple[int, Shown], str], list[str]]:
    """The copies by prompt and clip, and a note on differences that reveal a method without the picture: sizes, lengths or a sound."""
    clips: dict[tuple[int, Shown], str] = {}
    differing = []
    for prompt in range(len(study.prompts)):
        kinds = {}
        for number, method in enumerate(files):
            clips[prompt, Shown(number)], kinds[method] = copy_clip(files[method][prompt], folder)
        if len(set(kinds.values())) > 1:
            looks = ", ".join(f"{method} {kind}" for method, kind in kinds.items())
            differing.append(f"prompt {prompt + 1}: {looks}")
    for prompt, number in study.pool:
        clips[prompt, Shown(number, degraded=True)] = spoil_clip(files[study.methods[number]][prompt], folder)
    if not differing:
        return clips, []
    return clips, [
        f"{len(differing)} of {len(study.prompts)} prompts have clips of different size or length, which can tell "
        f"methods apart ({differing[0]})."
    ]


def open_study(folder: Path) -> Store:
    for name in (DATABASE, *(f"{DATABASE}-{end}" for end in ("wal", "shm", "journal")), CLIPS):
        inside(folder, name)  # the folder may be another user's, and all of these are written or served
    store = Store(folder / DATABASE)
    missing = [name for name in store.files() if clip_file(folder / CLIPS, name) is None]
    if missing:
        store.close()
        raise StudyError(f"{folder / CLIPS} lacks {len(missing)} videos of the study, first {missing[0]}.")
    return store


def invite(store: Store) -> tuple[int, str]:
    study = store.study
    wanted = comparisons(len(study.prompts), len(study.methods), study.against)
    tasks = deal(
        wanted,
        checks=study.checks,
        methods=len(study.methods),
        pool=[(prompt, method) for prompt, method in study.pool],
        rng=random.Random(f"{study.seed} rater {len(store.progress()) + 1}"),
    )
    return store.add_rater(tasks)


def find_clips(folders: Mapping[str, Path], prompts: Sequence[Prompt]) -> dict[str, list[Path]]:
    """Method -> its clip of every prompt. The error names missing clips.

    A prompt file's column `file` names the clip in each folder. Without it the clip of the k-th prompt, counted from 0, is the one
    whose name begins with that number (0007-a-cat.mp4), as `sage-grpo generate` writes them.
    """
    found: dict[str, list[Path]] = {}
    faults = []
    for method, folder in folders.items():
        if not folder.is_dir():
            raise StudyError(f"Method {method!r}: {folder} is not a folder.")
        root = folder.resolve()
        there = sorted(path for path in root.iterdir() if path.suffix.lower() in SUFFIXES)
        found[method] = []
        for place, prompt in enumerate(prompts):
            clip = _clip_of(there, root, place, prompt)
            if isinstance(clip, Path):
                found[method].append(clip)
            else:
                faults.append(f"{method}: prompt {place + 1} ({prompt.text[:60]!r}): {clip}")
    if faults:
        more = f"\n... and {len(faults) - NAMED_AT_ONCE} more" if len(faults) > NAMED_AT_ONCE else ""
        listed = "\n".join(f"  {fault}" for fault in faults[:NAMED_AT_ONCE])
        raise StudyError(f"Every method needs one clip of every prompt:\n{listed}{more}")
    return found


def _clip_of(there: Sequence[Path], root: Path, place: int, prompt: Prompt) -> Path | str:
    """The clip of a prompt, or the fault. The real file must lie in the folder: a link must not lead out of it."""
    name = str(prompt.metadata.get("file") or "")
    if name:
        path = root / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"file {name!r} must be a name inside the method's folder."
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            near = did_you_mean(name, [path.name for path in there])
            return f"there is no video {name} ({' or '.join(SUFFIXES)}) in {root}.{near}"
    else:
        fitting = [path for path in there if (number := re.match(r"\d+", path.name)) and int(number.group()) == place]
        if len(fitting) != 1:
            several = f"several clips begin with {place} ({', '.join(path.name for path in fitting[:3])})"
            return (
                f"{several if fitting else f'no clip in {root} begins with {place:04d}'}; name it in a column `file`."
            )
        path = fitting[0]
    real = path.resolve()
    return real if real.is_file() and real.is_relative_to(root) else f"{path} leads out of its folder, to {real}."


def clip_file(folder: Path, name: str) -> Path | None:
    """The file of a name in the database; None if it is missing, or not a regular file of the study's folder."""
    path = folder / name
    is_name = Path(name).name == name and path.suffix in SUFFIXES
    return path if is_name and path.is_file() and not path.is_symlink() else None


def copy_clip(source: Path, folder: Path) -> tuple[str, str]:
    """Copy a video's pictures and sound unchanged into the folder: its random name, and its format in words. StudyError when browsers cannot
    play it."""
    import av

    suffix = source.suffix.lower()
    name = f"{secrets.token_hex(16)}{suffix}"
    target = folder / name
    try:
        with av.open(str(source)) as old, av.open(str(target), "w", format=suffix[1:]) as new:
            if not old.streams.video:
                raise StudyError(f"{source} holds no video stream.")
            stream = old.streams.video[0]
            codec, pixels = stream.codec_context.name, str(stream.codec_context.pix_fmt)
            codec = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx-vp9": "vp9", "libvpx": "vp8"}.get(codec, codec)
            if codec not in PLAYED[suffix] or not pixels.startswith("yuv420p"):
                raise StudyError(
                    f"{source} is {codec} with {pixels} pixels, which not every browser plays: write it as H.264 with "
                    "yuv420p (even width and height)."
                )
            heard = old.streams.audio[:1]
            if heard and heard[0].codec_context.name not in HEARD[suffix]:
                raise StudyError(
                    f"The sound of {source} is {heard[0].codec_context.name}, which not every browser plays: write it as {HEARD[suffix][0]}, or leave it out."
                )
            copies = {one: new.add_stream_from_template(one) for one in (stream, *heard)}
            for copy in copies.values():
                copy.metadata.clear()
            for packet in old.demux(*copies):
                if packet.dts is not None:
                    packet.stream = copies[packet.stream]
                    new.mux(packet)
            seconds = float((stream.duration or 0) * stream.time_base) if stream.time_base else 0.0
            kind = f"{stream.width} x {stream.height}, {round(seconds, 2):g} s{', sound' if heard else ''}"
    except av.error.FFmpegError as error:
        raise StudyError(f"{source} cannot be read as a video: {error}.") from error
    return _settled(target), kind


def spoil_clip(source: Path, folder: Path) -> str:
    """A visibly worse copy: coarse blocks, and a third of the frames, each held."""
    import torch

    from sage_grpo.utils.video import read_sound, read_video, write_mp4

    clip, fps = read_video(source)
    frames, height, width, _ = clip.shape
    block = max(2, min(height, width) // 12)
    rows, columns = (torch.arange(size) // block * block for size in (height, width))
    held = torch.arange(frames) // 3 * 3
    spoilt = clip[held][:, rows][:, :, columns]
    target = write_mp4(folder / f"{secrets.token_hex(16)}.mp4", spoilt, fps, sound=read_sound(source))
    return _settled(target)


def _settled(file: Path) -> str:
    """Flush to disk, with a time stamp that hides the order of the copies."""
    os.utime(file, (0, 0))
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return file.name
