"""What pretrained files must hold, in words: checks on names and numbers that models and rewards share.

The libraries load what they find and fill the rest: a weight that is missing gets random values, a tokenizer without its
files an empty vocabulary. Both give plausible numbers that mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LEAST_COVERAGE = 0.75
"""A tokenizer knows at least this share of its model's embeddings; real ones know 99% (rows are padded to round numbers)."""


def weights_fault(
    missing: Iterable[str] = (), unexpected: Iterable[str] = (), mismatched: Iterable[Any] = ()
) -> str | None:
    """What is wrong with a file's names against its model's, or None."""
    kinds = {
        "lacks": sorted(missing),
        "also holds": sorted(unexpected),
        "holds in another shape": sorted(item if isinstance(item, str) else item[0] for item in mismatched),
    }
    parts = []
    for verb, names in kinds.items():
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"{verb} {', '.join(names[:5])}{more}")
    return "; it ".join(parts) or None


def loading_fault(info: Mapping[str, Any]) -> str | None:
    """The same for the loading information of transformers."""
    return weights_fault(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])


def tokenizer_fault(tokenizer: Any, folder: str | Path, rows: int) -> str | None:
    """What is wrong with a tokenizer for a model with `rows` embeddings, or None.

    A folder on this machine is searched for the tokenizer's files: a vocabulary without its merges reads every word
    letter by letter, and has the right size.
    """
    vocabulary = tokenizer.get_vocab()
    names = dict(tokenizer.vocab_files_names)
    whole = names.pop("tokenizer_file", "tokenizer.json")
    local = Path(folder)
    absent = []
    if local.is_dir() and not (local / whole).is_file():
        absent = [name for name in names.values() if not (local / name).is_file()]
    needed = " and ".join(names.values())
    files = f"{whole}, or {needed}" if needed else f"{whole} or tokenizer_config.json"
    if absent:
        return f'the tokenizer in "{folder}" is incomplete: it needs {files}, and there is no {" and no ".join(absent)}'
    size = max(vocabulary.values(), default=-1) + 1
    if size > rows:
        return (
            f'the tokenizer in "{folder}" knows {size} tokens, but its model has {rows} embeddings: they do not belong '
            "together"
        )
    if len(vocabulary) < LEAST_COVERAGE * rows:
        return (
            f'the tokenizer in "{folder}" knows {len(vocabulary)} tokens, but its model has {rows} embeddings: its files '
            f"({files}) are missing or another model's"
        )
    return None


def embedding_rows(config: Path) -> int | None:
    """The vocabulary size that a text model's config.json states, or None where it states none."""
    values = json.loads(config.read_text())
    return values.get("vocab_size", values.get("text_config", {}).get("vocab_size"))
