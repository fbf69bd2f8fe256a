"""Whether weight files are as long as they say, from their headers alone.

A download that broke off leaves a file with a good header and half of its numbers. The libraries notice when they read it, which for a
text encoder is long after a run began, and say so in words that name neither the file nor what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sage_grpo.documents import parse_json
from sage_grpo.models.checkpoints.safety import check_shards, shards_of
from sage_grpo.models.spec import ModelError

STEMS = ("diffusion_pytorch_model", "model")
"""Names under which diffusers and transformers look for weights."""
LENGTH = 8
"""Bytes at the start of a safetensors file that say how long its header is."""
LONGEST_HEADER = 100_000_000
"""Bytes that the format allows for a header."""


def check_lengths(folder: Path) -> None:
    """Refuse a checkpoint one of whose weight files was cut short, is missing from its index, or is no safetensors file."""
    check_shards(folder)
    for file in weight_files(folder):
        fault = length_fault(file)
        if fault is not None:
            raise ModelError(
                f"{file} {fault}. Download it again (`hf download NAME --include '{file.parent.name}/*'` fetches the component), or "
                "copy it again from where it is whole."
            )


def weight_files(folder: Path) -> Iterator[Path]:
    """The files that the libraries read of every component: what an index names, else the one file."""
    for component in sorted(path for path in folder.iterdir() if path.is_dir()):
        for stem in STEMS:
            index = component / f"{stem}.safetensors.index.json"
            if index.is_file():
                yield from (component / name for name in shards_of(index))
            elif (component / f"{stem}.safetensors").is_file():
                yield component / f"{stem}.safetensors"


def length_fault(file: Path) -> str | None:
    """What is wrong with a safetensors file's length, or None: a header that is whole says where the last tensor ends."""
    if not file.is_file():
        return "is missing, and the index beside it names it"
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(LENGTH), "little")
        if size < LENGTH or header > LONGEST_HEADER:
            return f"is no safetensors file ({size:,} bytes)"
        if LENGTH + header > size:
            return f"was cut short: it has {size:,} bytes, and its header alone has {LENGTH + header:,}"
        text = stream.read(header)
    try:
        tensors = parse_json(text)
        ends = [int(entry["data_offsets"][1]) for name, entry in tensors.items() if name != "__metadata__"]
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        return f"is no safetensors file (its header cannot be read: {type(error).__name__})"
    whole = LENGTH + header + max(ends, default=0)
    if size != whole:
        how = "was cut short" if size < whole else "holds more than its header names"
        return f"{how}: it has {size:,} bytes, and its header says {whole:,}"
    return None
