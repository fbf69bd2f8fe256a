"""What pretrained files must hold, in words: checks on names and numbers that models and rewards share.

The libraries load what they find and fill the rest: a weight that is missing gets random values, a tokenizer without its
files an empty vocabulary. Both give plausible numbers that mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sage_grpo.documents import DocumentError, read_object, shown

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


def tokenizer_files_fault(names: Mapping[str, str], folder: str | Path) -> str | None:
    """What a tokenizer's folder on this machine lacks of its files, or None.

    `names` is the class's `vocab_files_names`: one whole file, or all the others. A vocabulary without its merges would read
    every word letter by letter.
    """
    local, parts = Path(folder), dict(names)
    whole = parts.pop("tokenizer_file", "tokenizer.json")
    absent = [name for name in parts.values() if not (local / name).is_file()]
    if not local.is_dir() or (local / whole).is_file() or not absent:
        return None
    needed = " and ".join(parts.values())
    return (
        f'the tokenizer in "{folder}" needs {whole}, or {needed}, and there is no {" and no ".join([whole, *absent])}'
    )


def vocabulary_fault(tokenizer: Any, folder: str | Path, rows: int) -> str | None:
    """What is wrong with a tokenizer's vocabulary for a model with `rows` embeddings, or None."""
    vocabulary = tokenizer.get_vocab()
    size = max(vocabulary.values(), default=-1) + 1
    if size > rows:
        return (
            f'the tokenizer in "{folder}" knows {size} tokens, but its model has {rows} embeddings: they do not belong '
            "together"
        )
    if len(vocabulary) < LEAST_COVERAGE * rows:
        return (
            f'the tokenizer in "{folder}" knows {len(vocabulary)} tokens, but its model has {rows} embeddings: its files '
            f"({', '.join(tokenizer.vocab_files_names.values()) or 'added_tokens.json'}) are missing or another model's"
        )
    return None


def embedding_rows(config: Path) -> int | None:
    """The vocabulary size that a text model's config.json states, or None where it states none."""
    values = read_object(config)
    inner = values.get("text_config")
    rows = values.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int)):
        raise DocumentError(f"{config}: vocab_size must be a whole number, got {shown(rows)}.")
    return rows
