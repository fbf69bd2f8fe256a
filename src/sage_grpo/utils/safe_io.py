"""Access to untrusted folders: nothing outside is written, deleted, followed or shown, unless the user names it.

A folder that the user names may itself be a link, or lie behind one. Links within it that lead out of it come from its author, so they are refused,
and so are pipes, whose reader would wait. A file is written beside its place, under a new name, and replaces any file or link there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
"""Flag of os.open that refuses a link; 0 on systems without it, where links are rare."""


class LeadsOut(ValueError):
    """A path in a folder that leads out of it, to another place or another process; the message names it."""


def regular(path: Path) -> Path:
    """The same path, which may be missing; LeadsOut if it is neither a file nor a folder: opening a pipe waits for its other end."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise LeadsOut(f"{path} is a pipe, a socket or a device. Put a file there, or remove it.")
    return path


def alone(file: Path) -> Path:
    """The same path, to append to; LeadsOut if it is a hard link to another file, which would change as well."""
    if os.path.isfile(regular(file)) and file.stat().st_nlink > 1:
        raise LeadsOut(
            f"{file} is a hard link, so that another file would change with it. Copy the folder (cp -r), or remove the file."
        )
    return file


def inside(root: Path, *names: str | Path) -> Path:
    """A path in the folder that the user named; LeadsOut where a link, `..` or an absolute name takes it elsewhere."""
    path = root.joinpath(*names)
    home, real = Path(os.path.realpath(root)), Path(os.path.realpath(path))
    if not real.is_relative_to(home):
        raise LeadsOut(
            f"{path} leads out of {root}, to {real}. Links in the folder of a run or a comparison are not followed out of it: put the file itself "
            f"there, or name another folder (which may itself be a link)."
        )
    return regular(path)


def whole(root: Path, *names: str | Path) -> Path:
    """A folder (or a file) in the one that the user named; LeadsOut if anything below it is a pipe or a link that leads out."""
    path = inside(root, *names)
    for folder, folders, files in os.walk(path):  # follows no links
        for name in (*folders, *files):
            if os.path.islink(os.path.join(folder, name)):
                inside(path, Path(folder, name).relative_to(path))
            regular(Path(folder, name))
    return path


def check(root: Path, names: Iterable[str]) -> None:
    """Refuse, before anything is written, a folder in which one of these names, or anything below it, leads out."""
    for name in names:
        alone(whole(root, name))


@contextmanager
def replacing(target: Path, *, suffix: str = ".tmp") -> Iterator[Path]:
    """A new file beside `target` to write to, which then takes its place; after an error nothing of it is left.

    A file or link already under the new name is removed and never written through. `suffix` is for writers that go by it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}{suffix}")
    fresh.unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS, 0o666))
    try:
        yield fresh
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def replace_text(target: Path, text: str, *, newline: str | None = None) -> None:
    with replacing(target) as fresh:
        fresh.write_text(text, encoding="utf-8", newline=newline)


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which begin terminal escapes; not tabs and ends of lines."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys or cannot show: control characters, which begin escapes, marks that turn the direction of a line, and lone
surrogates."""


def printable(text: str) -> str:
    """A text for a terminal: characters that it would obey become their codes. Tabs and ends of lines stay."""
    return OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
