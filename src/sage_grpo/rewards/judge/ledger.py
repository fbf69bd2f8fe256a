"""Scores that were paid for, kept in files: a continued run does not pay twice, and knows what it has spent.

Every process appends lines of JSON to a file of its own and reads everybody's at its start. A line holds a digest of the request,
scores, reasons and counts; neither clips nor prompts nor keys.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sage_grpo.documents import parse_json
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.judge.meter import Usage

log = logging.getLogger(__name__)


class Ledger:
    """Known scores by digest. Without a folder it lives as long as the process."""

    def __init__(self, folder: str, parts: Sequence[str]) -> None:
        self.spent = Usage()
        """What all earlier processes have spent."""
        self._known: dict[str, tuple[dict[str, float], dict[str, str]]] = {}
        self._parts, self._lock = tuple(parts), threading.Lock()
        self._file: Path | None = None
        if folder:
            place = Path(folder).expanduser()
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RewardConfigError(f"The judge's cache {place} cannot be a folder: {error}.") from error
            for file in sorted(place.glob("judge-*.jsonl")):
                self._read(file)
            self._file = place / f"judge-{uuid.uuid4().hex}.jsonl"

    def __len__(self) -> int:
        return len(self._known)

    def find(self, digest: str) -> tuple[dict[str, float], dict[str, str]] | None:
        """Scores and reasons of a request that was answered before."""
        with self._lock:
            return self._known.get(digest)

    def keep(self, digest: str, scores: Mapping[str, float], reasons: Mapping[str, str], usage: Usage) -> None:
        """Note a request's end; without scores only what it cost."""
        line: dict[str, Any] = {"digest": digest, "scores": dict(scores), "reasons": dict(reasons), **asdict(usage)}
        with self._lock:
            if scores:
                self._known[digest] = (dict(scores), dict(reasons))
            if self._file is None:
                return
            try:
                with self._file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line, allow_nan=False) + "\n")
                    stream.flush()
                    os.fsync(stream.fileno())
            except OSError as error:  # a full disk must not cost the scores; the run goes on and may pay again
                log.warning("The judge's cache %s cannot be written: %s", self._file, error)

    def _read(self, file: Path) -> None:
        """Take the lines of a file; a process that was killed leaves its last one torn."""
        torn = 0
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = parse_json(text)
                usage = Usage(*(int(line[name]) for name in ("requests", "input_tokens", "output_tokens")))
                scores = {str(part): float(value) for part, value in line["scores"].items()}
                reasons = {str(part): str(reason) for part, reason in line["reasons"].items()}
                digest = str(line["digest"])
            except (ValueError, KeyError, TypeError, AttributeError):
                torn += 1
                continue
            self.spent.add(usage)
            if set(self._parts) <= set(scores) and all(math.isfinite(value) for value in scores.values()):
                self._known[digest] = (scores, reasons)
        if torn:
            log.warning("%d lines of the judge's cache %s cannot be read and are paid for again.", torn, file)
