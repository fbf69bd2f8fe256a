"""The Hugging Face hub: names of repositories, and downloads at a recorded commit, of safetensors and text alone, which cannot run code.

Tokens come from the environment or the hub's own login and are never read here.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
NAME = r"[\w-][\w.-]*/[\w-][\w.-]*"
COMMIT = re.compile(r"[0-9a-f]{40}")
SAFE = ("*.safetensors", "*.json", "*.txt", "*.md", "*.model", "*.jinja")
"""Files that are data."""


class HubError(ValueError):
    """A request that the hub refuses or cannot serve; the message gives the remedy."""


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit, with their sizes in bytes."""

    repo: str
    commit: str
    files: Mapping[str, int]

    @property
    def size(self) -> int:
        return sum(self.files.values())

    @property
    def table(self) -> str:
        rows = [f"  {in_words(size):>9}  {name}" for name, size in self.files.items()]
        return "\n".join([*rows, f"  {in_words(self.size):>9}  in {len(rows)} file(s)"])


def hub_name(value: str) -> tuple[str, str | None] | None:
    """The repository and revision of "owner/name" or "owner/name@revision"; None for anything else, and for local paths."""
    match = re.fullmatch(rf"({NAME})(?:@([\w./-]+))?", value)
    if match is None or Path(value).expanduser().exists():
        return None
    return match[1], match[2]


def listing(repo: str, revision: str | None = None, wanted: Callable[[str], bool] = lambda name: True) -> Listing:
    from huggingface_hub import HfApi

    info = _asked(repo, lambda: HfApi().model_info(repo, revision=revision, files_metadata=True))
    files = {one.rfilename: one.size or 0 for one in info.siblings or [] if wanted(one.rfilename)}
    if not files:
        raise HubError(f"{repo} holds nothing on the hub that is needed from it. Is it the right name?")
    return Listing(repo, str(info.sha), dict(sorted(files.items())))


def fetch(wanted: Listing, *, revision: str | None = None, folder: Path | None = None) -> Path:
    """Fetch the files of a listing, into the hub's cache or a folder."""
    from huggingface_hub import snapshot_download

    names = [glob.escape(name) for name in wanted.files]
    fetched = partial(snapshot_download, wanted.repo, revision=revision, allow_patterns=names, local_dir=folder)
    return Path(_asked(wanted.repo, fetched))


def pinned_folder(value: str, *, option: str) -> Path:
    """A local folder, or one of the hub at a commit, `owner/name@COMMIT`. A branch is refused with its present commit."""
    named = hub_name(value) if "@" in value else None
    if named is None:
        return Path(value).expanduser()
    repo, revision = named
    if COMMIT.fullmatch(str(revision)) is None:
        commit = listing(repo, revision).commit
        raise HubError(
            f'{option} "{value}" is on the hub, where it may change: name the commit. The present one is {repo}@{commit}'
        )
    from huggingface_hub import snapshot_download

    place = _asked(repo, lambda: snapshot_download(repo, revision=revision, allow_patterns=list(SAFE)))
    if not list(Path(place).rglob("*.safetensors")):
        raise HubError(
            f"{option}: {repo} holds no .safetensors file, and pickled weights are not fetched from the hub. If you trust it, "
            f"hf download {repo} --local-dir FOLDER and give the folder."
        )
    return Path(place)


def pinned_dataset(value: str) -> tuple[str, str, str]:
    """Repository, commit and split of a dataset, `owner/name@COMMIT` or `owner/name@COMMIT:SPLIT`. A branch is refused with its present commit."""
    match = re.fullmatch(rf"({NAME})(?:@([\w./-]+))?(?::([\w.-]+))?", value)
    if match is None:
        raise HubError(
            f"{value!r} is not the name of a dataset: write hf:owner/name@COMMIT, or hf:owner/name@COMMIT:SPLIT."
        )
    repo, revision, split = match.groups(default="")
    if COMMIT.fullmatch(revision) is None:
        from huggingface_hub import HfApi

        commit = _asked(repo, lambda: HfApi().dataset_info(repo, revision=revision or None)).sha
        raise HubError(
            f"hf:{value} is on the hub, where it may change: name the commit. The present one is hf:{repo}@{commit}"
        )
    return repo, revision, split


def in_words(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def failures() -> tuple[type[Exception], ...]:
    """The errors of a request to the hub: of the hub, of the disk, and of the HTTP client, which differs between versions."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    client = HfHubHTTPError.__bases__[0]  # the base of all of the client's errors, a missing connection included
    return (client, HFValidationError, OSError)


def _asked(repo: str, request: Callable[[], T]) -> T:
    try:
        return request()
    except failures() as error:
        text = str(error).splitlines()[0] if str(error) else "no message"
        raise HubError(
            f"The hub has no answer about {repo} ({type(error).__name__}: {text}). Check the name, the network and your login "
            "(hf auth login)."
        ) from error
