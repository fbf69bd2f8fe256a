"""The documentation as a site: `make docs`, or `python scripts/docs_site.py [FOLDER]`, with Sphinx. A warning is an error.

The documents are written to be read in the repository, where a link to a source file works and README.md is the start. The site has docs/,
the results and the log of research/, so links that leave these go to the repository's page, and what a reader needs from outside is brought in:
the README as the first page, and the reference of the commands, which is written from the code.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from sage_grpo import __version__
from sage_grpo.cli import COMMANDS
from sage_grpo.config.help import manual
from sage_grpo.recipes import meanings

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/sage-grpo/sage-grpo"
BROUGHT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Files of the repository -> pages of the site."""
PARTS = {"docs": "", "research/results": "results/", "research/log.md": "log.md"}
"""Folders and files of the repository -> their place in the site, the whole of docs/ first."""
CONTENTS = {
    "Start": ["README", "install", "demo", "commands", "recipes"],
    "Guides": [
        "guides/wan-one-gpu",
        "guides/few-steps",
        "guides/hunyuan15-one-gpu",
        "guides/own-reward",
    ],
    "Using it": [
        "rewards",
        "models",
        "image-models",
        "sound",
        "doctor",
        "reading-a-run",
        "what-to-change-first",
        "study",
        "preferences",
        "probe",
        "compare",
        "scale",
        "speed",
        "hub",
        "from-official",
    ],
    "Method": ["method"],
    "Reference": ["reference/commands", "config", "api", "extending"],
    "Evidence": ["trust", "results/README", "results/headline", "benchmark", "bench-export", "log", "images/README"],
    "Project": ["architecture", "contributing", "changes"],
}
"""Pages by heading, in the order of the sidebar; documents that are in none of them come last, under "More"."""
LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)\s]+)(\))")
UNITS = "±|%|x|s|ms|min|h|GB|GiB|MB|dB|passes"
BREAK = re.compile(rf"(`+[^`]*`+)|(?<=\d) (?=(?:{UNITS})(?:\W|$))|(?<=±) (?=[\d.])", re.MULTILINE)
"""Blanks within a figure, where a narrow column must not break it; what is code stays as it is, to be copied."""
SETTINGS = {
    "project": "sage-grpo",
    "release": __version__,
    "html_title": f"sage-grpo {__version__}",
    "html_theme": "furo",
    "extensions": ["myst_parser"],
    "myst_heading_anchors": 4,
    "copyright": "The sage-grpo authors",
}


def build(out: Path) -> int:
    """Write the site to `out`; the status is not 0 after a warning."""
    from sphinx.application import Sphinx

    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        write_sources(source)
        app = Sphinx(
            source,
            None,
            out,
            Path(place) / "doctrees",
            "html",
            confoverrides=SETTINGS,
            status=None,
            warningiserror=True,
            exception_on_warning=False,
        )
        app.build()
        return int(app.statuscode)


def write_sources(folder: Path) -> None:
    """The documents, what is brought in and what is written from the code, with links that hold there."""
    for path in _files():
        origin = path.relative_to(ROOT).as_posix()
        page = str(_page_of(origin))
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            (folder / page).write_text(relinked(path.read_text(encoding="utf-8"), origin, page), encoding="utf-8")
        else:
            shutil.copyfile(path, folder / page)
    for origin, page in BROUGHT.items():
        text = relinked((ROOT / origin).read_text(encoding="utf-8"), origin, page)
        (folder / page).write_text(text + (contents() if page == "index.md" else ""), encoding="utf-8")
    (folder / "reference").mkdir()
    (folder / "reference" / "commands.md").write_text(commands(), encoding="utf-8")


def contents() -> str:
    """The sidebar, as Sphinx wants it: in the first page, unseen there."""
    named = {page for pages in CONTENTS.values() for page in pages}
    pages = [str(_page_of(path.relative_to(ROOT).as_posix())) for path in _files() if path.suffix == ".md"]
    documents = {page.removesuffix(".md") for page in pages}
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n" + "\n".join(pages) + "\n```\n"
        for heading, pages in {**CONTENTS, "More": sorted(documents - named)}.items()
        if pages
    )


def _files() -> list[Path]:
    """Files of the repository that the site has."""
    found = [file for part in PARTS for file in ((ROOT / part), *(ROOT / part).rglob("*"))]
    return sorted(file for file in found if file.is_file())


def _page_of(path: str) -> str | None:
    """The place in the site of a file of the repository; None for a file that is not part of it."""
    for part, place in PARTS.items():
        if path == part or path.startswith(f"{part}/"):
            return place + path.removeprefix(part).removeprefix("/")
    return None


def relinked(text: str, origin: str, page: str) -> str:
    """`text` of the repository's file `origin`, its relative links made to hold in the page `page` of the site."""

    def linked(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{origin} links to {target}, and there is no {path}.")
        anchor = f"#{anchor}" if anchor else ""
        inside = BROUGHT.get(path) or _page_of(path)
        if inside is not None and (ROOT / path).is_file():
            return f"{match[1]}{posixpath.relpath(inside, posixpath.dirname(page) or '.')}{anchor}{match[3]}"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{match[1]}{REPOSITORY}/{kind}/main/{path}{anchor}{match[3]}"

    return _outside_code(text, lambda part: BREAK.sub(lambda blank: blank[1] or "\u00a0", LINK.sub(linked, part)))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts = re.split(r"(^ *```.*?^ *```[^\n]*$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if place % 2 else change(part) for place, part in enumerate(parts))


def commands() -> str:
    """Every command with its help, as `sage-grpo COMMAND --help` and `--help all` print it."""
    lines = [
        "# Commands",
        "",
        "Written from the code: what `sage-grpo COMMAND --help` and `--help all` print. [Configuration](../config.md) has the",
        "options of `train`, which `plan` and `probe` take as well.",
        "",
    ]
    for name, command in COMMANDS.items():
        module = importlib.import_module(f"sage_grpo.cli.{command.module}")
        recipes = meanings() if command.recipes else None
        about = (module.__doc__ or "").strip()
        text = manual(module.Options, "", prog=f"sage-grpo {name}", about=about, recipes=recipes)
        lines += [
            f"## {name}",
            "",
            f"{command.summary[0].upper()}{command.summary[1:]}.",
            "",
            "```text",
            text,
            "```",
            "",
        ]
        if not command.recipes:  # those of train are the page on configuration
            lines += ["```text", manual(module.Options, "all", prog="", about=""), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site")
    status = build(site)
    print(f"The site is in {site}: open {site / 'index.html'} in a browser.")
    sys.exit(status)
