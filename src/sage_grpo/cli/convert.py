"""HunyuanVideo-1.5 weights from the original layout, which the paper's released code trains, to diffusers' and back.

`sage-grpo convert SOURCE --base DIFFUSERS_CHECKPOINT --out FOLDER` writes a diffusers checkpoint with the source's weights, which every command here takes as
`--model.path`. `--to original` writes a diffusers checkpoint's transformer under its authors' names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sage_grpo.config.ranges import Folder, checked


@checked
class Options:
    """What to convert."""

    source: str = ""
    """A .safetensors file or a folder of them; with `to: original` a diffusers checkpoint, a folder or a hub name."""
    to: Literal["diffusers", "original"] = "diffusers"
    """The layout to write."""
    base: str = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    """The diffusers checkpoint of the same kind, a folder or a hub name: it gives the VAE, the text encoders and the configuration."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What to store weights in; None is the source's."""
    out: Folder = "converted"
    """Folder to write; it must not exist."""


def run(options: Options) -> int:
    """Convert."""
    if not options.source:
        raise ValueError("convert needs what to convert: sage-grpo convert FILE_OR_FOLDER --out FOLDER.")
    out = Path(options.out)
    if (
        options.to == "diffusers" and not Path(options.source).expanduser().exists()
    ):  # before the base is asked for at the hub
        raise FileNotFoundError(f"There is no file or folder {options.source} to convert.")
    if out.exists():
        raise ValueError(f"{out} exists already: choose another --out, or remove it.")
    import torch

    from sage_grpo.models.checkpoints.convert import diffusers_to_original, original_to_diffusers

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.to == "diffusers":
        count = original_to_diffusers(Path(options.source).expanduser(), options.base, out, dtype)
        print(
            f"Wrote {out}: a diffusers checkpoint with {count} tensors of {options.source}. Use it as --model.path {out}."
        )
        return 0
    count = diffusers_to_original(options.source, out, dtype)
    print(f"Wrote {out}: {count} tensors under the original names. Its config.json is that of the authors' release.")
    return 0
