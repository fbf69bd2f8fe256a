"""Run a blind study in the browser: people compare videos of two methods side by side.

`create` checks and copies the videos, `links` invites raters, `serve` runs the server, `results` prints win rates and agreement, and
`export` writes the votes as CSV, or preferred pairs for training (docs/preferences.md).
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from sage_grpo.config.ranges import Count, Positive, Range, Seed, Share, checked
from sage_grpo.tools.study.making import CLIPS, DIMENSIONS, StudyPlan, invite, make, open_study
from sage_grpo.tools.study.store import StudyError
from sage_grpo.utils.http_server import is_loopback
from sage_grpo.utils.safe_io import printable, replace_text

PORT = 8770


@checked
class StudyLimits:
    """Limits of the server."""

    rate: Positive = 20.0
    """Requests per second that each rater may make, apart from videos."""
    burst: Count = 60
    """Requests above that rate that are allowed at once."""


@checked
class Options:
    """An action, and its study."""

    action: Literal["create", "links", "serve", "results", "export"]
    """Action on the study."""
    study: Path = Path("study")
    """Folder of the study."""
    methods: dict[str, str] = field(default_factory=dict)
    """create: each method's name and clips, {sage: clips/sage, base: clips/base}. Raters never see the names."""
    prompts: Path | None = None
    """create: .txt, .csv or .jsonl file of prompts; column file names the clip, else clips are numbered from 0000."""
    title: str = "Which video is better?"
    """create: the title that raters read."""
    dimensions: dict[str, str] = field(default_factory=lambda: dict(DIMENSIONS))
    """create: name and question of every dimension."""
    against: str | None = None
    """create: compare this method with each other one; None compares all pairs."""
    checks: Annotated[float, Range(0, 0.5)] = 0.1
    """create: attention checks as a share of a rater's comparisons; 0 is none."""
    max_failed: Share = 0.25
    """create: flag raters who fail a larger share of their attention checks."""
    seed: Seed | None = None
    """create: seed of pairs, sides and orders; None draws one."""
    raters: Count | None = None
    """links: raters to add. Each link is shown once, since only its hash is stored."""
    renew: str | None = None
    """links: number of the rater (or admin) whose link to replace."""
    url: str = f"http://127.0.0.1:{PORT}"
    """create, links: address at which raters reach the server."""
    host: str = "127.0.0.1"
    """serve: address to listen on."""
    port: Annotated[int, Range(0, 65535)] = PORT
    """serve: port to listen on."""
    limits: StudyLimits = field(default_factory=StudyLimits)
    """serve: limits on requests."""
    exclude_flagged: bool = False
    """results, export for training: leave out raters who failed the attention checks."""
    json: bool = False
    """results: print JSON."""
    out: Path | None = None
    """export: file to write; null is votes.csv, or pairs.jsonl for training."""
    for_training: bool = False
    """export: write each pair's majority choice for data.clips, instead of votes."""
    dimension: str | None = None
    """export for training: the question whose answers count; null is all together."""


def run(options: Options) -> int:
    actions = {"create": _create, "links": _links, "serve": _serve, "results": _results, "export": _export}
    actions[options.action](options)
    return 0


def _create(options: Options) -> None:
    from sage_grpo.data.prompts import load_prompts

    if options.prompts is None or not options.methods:
        raise StudyError("study create needs --methods '{name: folder, ...}' and --prompts FILE.")
    prompts = load_prompts(options.prompts)
    plan = StudyPlan(
        title=options.title,
        methods={name: Path(folder) for name, folder in options.methods.items()},
        prompts=prompts,
        dimensions=options.dimensions,
        against=options.against,
        checks=options.checks,
        max_failed=options.max_failed,
        seed=options.seed,
    )
    token, notes = make(options.study, plan)
    for note in notes:
        print(printable(f"Note: {note}"))
    print(f"{options.study}: {len(plan.methods)} methods, {len(prompts)} prompts.")
    print(f"Results, shown once: {_link(options, 'results', token)}")
    _say_who_reaches(options)
    print(f"Next: sage-grpo study links --study {options.study} --raters 5, then sage-grpo study serve.")


def _links(options: Options) -> None:
    store = open_study(options.study)
    with contextlib.closing(store):
        if options.renew == "admin":
            print(f"results  {_link(options, 'results', store.renew(None))}")
        elif options.renew is not None:
            if not options.renew.isdecimal():
                raise StudyError(f'renew must be the number of a rater or "admin", got {options.renew!r}.')
            print(f"rater {options.renew}  {_link(options, 'rate', store.renew(int(options.renew)))}")
        for _ in range(options.raters or 0):
            rater, token = invite(store)
            print(f"rater {rater}  {_link(options, 'rate', token)}")
        if options.raters is None and options.renew is None:
            for rater, (done, total) in store.progress().items():
                print(f"rater {rater}: {done} of {total}")
            print("--raters N adds raters and shows their links, --renew NUMBER replaces one.")
        else:
            _say_who_reaches(options)


def _say_who_reaches(options: Options) -> None:
    if is_loopback(urlsplit(options.url).hostname or ""):
        print(
            f"These links open on this machine only. A colleague with a login here opens them through `ssh -L {PORT}:127.0.0.1:{PORT} NAME`. For "
            f"raters elsewhere serve with --host 0.0.0.0, behind a proxy with HTTPS, and make links with its address, `--url https://NAME`.",
            file=sys.stderr,
        )


def _link(options: Options, page: str, token: str) -> str:
    return f"{options.url.rstrip('/')}/{page}#{token}"


def _serve(options: Options) -> None:
    from sage_grpo.utils.http_server import check_installed, check_port, serve

    check_installed()
    from sage_grpo.tools.study.app import create_app

    store = open_study(options.study)
    app = create_app(store, options.study / CLIPS, rate=options.limits.rate, burst=options.limits.burst)
    check_port(options.host, options.port)
    if not is_loopback(options.host):
        print("Note: links and votes are not encrypted; put a proxy with HTTPS in front of this server.")
    else:
        print("Only this machine reaches this address; --host 0.0.0.0 serves raters elsewhere (docs/study.md).")
    print(f"Serving {options.study} on http://{options.host}:{options.port}.", flush=True)
    with contextlib.closing(store):
        started = serve(
            app,
            header_timeout=30.0,
            max_connections=1024,
            host=options.host,
            port=options.port,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
    if not started:
        raise StudyError(f"The server could not listen on {options.host}:{options.port}.")


def _results(options: Options) -> None:
    from sage_grpo.tools.study.results import results, to_text

    with contextlib.closing(open_study(options.study)) as store:
        found = results(store, exclude_flagged=options.exclude_flagged)
    print(json.dumps(found) if options.json else printable(to_text(found)))


def _export(options: Options) -> None:
    from sage_grpo.tools.study.results import to_csv

    if options.for_training:
        _export_pairs(options)
        return
    if options.dimension is not None or options.exclude_flagged:
        raise StudyError("study export writes all votes: --dimension and --exclude_flagged need --for_training.")
    out = options.out or Path("votes.csv")
    with contextlib.closing(open_study(options.study)) as store:
        text, rows = to_csv(store), len(store.votes()) * len(store.study.dimensions)
    replace_text(out, text, newline="")
    print(f"{rows} rows in {out}")


def _export_pairs(options: Options) -> None:
    from sage_grpo.tools.study.results import preferences

    out = options.out or options.study / "pairs.jsonl"
    with contextlib.closing(open_study(options.study)) as store:
        found = preferences(store, dimension=options.dimension, exclude_flagged=options.exclude_flagged)
    if not found.rows:
        raise StudyError(f"{options.study} has no pair that its {found.votes} votes decide: nothing to learn from yet.")
    replace_text(out, found.to_jsonl(options.study / CLIPS, out.parent))
    left = f"; {found.undecided} pairs are left out, which are tied" if found.undecided else ""
    print(f"{len(found.rows)} pairs of {found.votes} votes in {out}{left}.")
    print(f"Next: sage-grpo train wan/dpo --data.clips {out}")
