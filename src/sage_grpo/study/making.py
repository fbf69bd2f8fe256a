"""A new study: its videos are checked and copied, its database is written, and the folder appears when all is done."""

from __future__ import annotations

import random
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sage_grpo.data.prompts import Prompt
from sage_grpo.hints import did_you_mean
from sage_grpo.inside import inside
from sage_grpo.study.material import clip_file, copy_clip, find_clips, spoil_clip, unequal
from sage_grpo.study.pairs import Shown, check_count, comparisons, deal, spoilt_pool
from sage_grpo.study.store import Store, Study, StudyError

DATABASE, CLIPS = "study.sqlite", "clips"
DIMENSIONS = {
    "visual quality": "Which video looks better? Think of sharpness, colours, and things that look wrong.",
    "motion quality": "Which video moves better? Think of smooth, natural and steady motion.",
    "semantic alignment": "Which video fits the text better?",
}
"""The dimensions of the paper's user study."""
PAPER_PROMPTS = 32
LONGEST_NAME, LONGEST_PROMPT = 80, 8000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a study is made of."""

    title: str
    methods: Mapping[str, Path]
    """Name -> folder of clips."""
    prompts: Sequence[Prompt]
    dimensions: Mapping[str, str] = field(default_factory=lambda: dict(DIMENSIONS))
    against: str | None = None
    per_rater: int | None = None
    checks: float = 0.1
    max_failed: float = 0.25
    seed: int | None = None


def make(folder: Path, plan: Plan) -> tuple[str, list[str]]:
    """Make a study in a new folder; returns the token of its results, and what its owner should know."""
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


def _check(plan: Plan) -> None:
    """Refuse what needs no look at a video."""
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
            raise StudyError(f"{name[:100]!r} is no name: 1 to {LONGEST_NAME} printable characters.")
    for place, prompt in enumerate(plan.prompts):
        if len(prompt.text) > LONGEST_PROMPT:
            raise StudyError(f"Prompt {place + 1} has {len(prompt.text)} characters, more than {LONGEST_PROMPT}.")
    if plan.against is not None and plan.against not in plan.methods:
        raise StudyError(f"against: there is no method {plan.against!r}.{did_you_mean(plan.against, plan.methods)}")
    total = len(comparisons(len(plan.prompts), len(plan.methods), 0 if plan.against else None))
    if plan.per_rater is not None and plan.per_rater > total:
        raise StudyError(f"per_rater must be at most {total}, the comparisons that there are, got {plan.per_rater}.")


def _design(plan: Plan) -> Study:
    seed = secrets.randbits(32) if plan.seed is None else plan.seed
    methods, prompts = list(plan.methods), [prompt.text for prompt in plan.prompts]
    against = None if plan.against is None else methods.index(plan.against)
    tasks = plan.per_rater or len(comparisons(len(prompts), len(methods), against))
    checks = check_count(plan.checks, tasks)
    return Study(
        title=plan.title,
        methods=methods,
        prompts=prompts,
        dimensions=dict(plan.dimensions),
        against=against,
        per_rater=plan.per_rater,
        checks=checks,
        max_failed=plan.max_failed,
        pool=spoilt_pool(checks, len(prompts), len(methods), random.Random(f"{seed} pool")),
        seed=seed,
    )


def _copy(
    found: Mapping[str, Sequence[Path]], study: Study, folder: Path
) -> tuple[dict[tuple[int, Shown], str], list[str]]:
    clips: dict[tuple[int, Shown], str] = {}
    kinds = {}
    for number, (method, files) in enumerate(found.items()):
        for prompt, file in enumerate(files):
            clips[prompt, Shown(number)], kinds[prompt, method] = copy_clip(file, folder)
    for prompt, number in study.pool:
        file = list(found.values())[number][prompt]
        clips[prompt, Shown(number, degraded=True)] = spoil_clip(file, folder)
    differing = unequal(kinds, len(study.prompts))
    if not differing:
        return clips, []
    return clips, [
        f"{len(differing)} of {len(study.prompts)} prompts have clips of different size or length, which can tell "
        f"methods apart ({differing[0]})."
    ]


def open_study(folder: Path) -> Store:
    """The store of a study; the error says which videos are missing."""
    for name in (DATABASE, *(f"{DATABASE}-{end}" for end in ("wal", "shm", "journal")), CLIPS):
        inside(folder, name)  # the folder may be somebody else's, and all of these are written or served
    store = Store(folder / DATABASE)
    missing = [name for name in store.files() if clip_file(folder / CLIPS, name) is None]
    if missing:
        store.close()
        raise StudyError(f"{folder / CLIPS} lacks {len(missing)} videos of the study, first {missing[0]}.")
    return store


def invite(store: Store) -> tuple[int, str]:
    """A new rater with tasks of their own: number and token."""
    study = store.study
    wanted = comparisons(len(study.prompts), len(study.methods), study.against)
    tasks = deal(
        wanted,
        seen=store.dealt(),
        count=study.per_rater,
        checks=study.checks,
        methods=len(study.methods),
        pool=[(prompt, method) for prompt, method in study.pool],
        rng=random.Random(f"{study.seed} rater {len(store.progress()) + 1}"),
    )
    return store.add_rater(tasks)
