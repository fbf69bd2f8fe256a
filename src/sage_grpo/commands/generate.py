"""Prompts to mp4 files and a contact sheet, with any kernel, LoRA or checkpoint.

`--run DIR` takes the model of a run as it was trained (checkpoint, sizes, fps, guidance, shift, dtype) with any of its weights.
"""

from __future__ import annotations

from sage_grpo.commands.clips import Options, defaults, load, plan, sample, write

__all__ = ["Options", "defaults", "load", "plan", "run", "sample"]


def run(options: Options) -> int:
    """Generate and write; returns the exit status."""
    if options.bench is None:
        return write(options)
    from sage_grpo.commands import bench

    return bench.run(options)
