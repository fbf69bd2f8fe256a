"""What a package index shows: the README with links that lead from there into the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<start>!?\[[^\]]*\]\()(?P<target>(?!https?://|mailto:|#)[^)\s]+)\)")


def absolute_links(text: str, source: str) -> str:
    """Markdown whose relative links point into the repository at `source`: pictures to the raw file, others to its page.

    An index has none of the repository's files, and a picture needs the file itself.
    """
    raw = source.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def linked(match: re.Match[str]) -> str:
        start, target = match["start"], match["target"]
        return f"{start}{raw}/main/{target})" if start.startswith("!") else f"{start}{source}/blob/main/{target})"

    return LINK.sub(linked, text)


class ReadmeHook(MetadataHookInterface):
    """Fills in the dynamic field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute_links(text, metadata["urls"]["Source"]),
        }
