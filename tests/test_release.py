"""The site of the documents: links hold, and it is built without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import needs

ROOT = Path(__file__).resolve().parents[1]


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_links_of_pages_hold_where_they_are_shown() -> None:
    site = module(ROOT / "scripts" / "docs_site.py")
    source = re.findall(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)[0]
    assert source == site.REPOSITORY
    block = "```\n[e](docs/x.md)\n```\n"
    shown = f"{source}/blob/main/examples/api.ipynb"
    for text, file, page, wanted in (
        ("[a](docs/speed.md#decoding)", "README.md", "index.md", "[a](speed.md#decoding)"),
        ("[b](../../CONTRIBUTING.md)", "docs/guides/x.md", "guides/x.md", "[b](../contributing.md)"),
        ("[c](examples/api.ipynb) [d](https://e.org)", "README.md", "index.md", f"[c]({shown}) [d](https://e.org)"),
        (block, "README.md", "index.md", block),
        # A narrow column breaks no figure; code can be copied.
        ("| 1 ± 0.1 | 37 % of 3 s | `0 ± 1` |", "docs/r.md", "r.md", "| 1\u00a0±\u00a00.1 | 37\u00a0% of 3\u00a0s | `0 ± 1` |"),
    ):  # fmt: skip
        assert site.relinked(text, file, page) == wanted
    with pytest.raises(FileNotFoundError, match=r"links to docs/nowhere\.md"):
        site.relinked("[f](docs/nowhere.md)", "README.md", "index.md")


SCRIPTS = [*(ROOT / "scripts").glob("*.sh"), ROOT / "tests" / "browser" / "install.sh", ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse(script: Path) -> None:
    """A scheduler would find it out only once the job has its nodes."""
    done = subprocess.run([needs.program("bash"), "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_is_made_of_files_that_docker_may_copy() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    files = " ".join(copied).split()
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
    assert set(files) == set(allowed)
    assert all((ROOT / name).exists() for name in files)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/docs_site.py", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    for document in (ROOT / "docs").rglob("*.md"):
        assert document.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in pages
    assert {"index.html", "reference/commands.html"} <= pages
