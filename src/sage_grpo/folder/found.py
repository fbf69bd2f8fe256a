"""What a run finds in its folder, and whether it may go on from there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sage_grpo.folder import identity
from sage_grpo.parallel import checkpoint
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import Given

FINISHED = ".finished"
"""Holds the iteration whose weights are in final/: written last, so that a run that was killed before is not taken for done."""


@dataclass(frozen=True)
class Found:
    """What a run finds in its folder."""

    checkpoint: str
    """Name of the checkpoint that it continues from; empty for none."""
    identity: dict[str, str]
    """Fingerprints of what it trains on."""
    changed: list[str]
    """Harmless or allowed changes since then."""
    notes: list[str]
    finished: int | None
    """The iteration at which it is already done."""


def look_around(config: TrainConfig, own: Given, out: Path) -> Found:
    """What is in the folder and whether this run may continue it; refuses before anything heavy is loaded."""
    identity.check_names(config.allow_changes)
    root, mode = out / "checkpoints", config.resume
    if mode == "never" and root.is_dir() and any(root.iterdir()):
        raise ValueError(
            f"{out} holds checkpoints of another run. Choose another `out`, or resume: auto to continue it."
        )
    notes = checkpoint.recover(root)
    folder = checkpoint.newest_good(root)
    if folder is None and checkpoint.folders(root):
        # Starting anew would overwrite the metrics of a run whose checkpoints someone may still be able to repair.
        raise checkpoint.CheckpointError(
            f"{root} has checkpoints, but every checkpoint there is damaged (see the warnings). Restore one from a copy, or "
            "choose another `out` to start anew."
        )
    if mode == "must" and folder is None:
        raise FileNotFoundError(f"resume: must, but {root} holds no usable checkpoint.")
    prints = identity.identify(config, own)
    found = Found("", prints, [], notes, None)
    if folder is not None:
        meta = checkpoint.read_meta(folder, {"config": dict, "iteration": int})
        changed = identity.check(config, prints, meta, out)
        notes += identity.unsure(own)
        done = int(meta["iteration"]) if int(meta["iteration"]) >= config.iterations and _is_final(out, meta) else None
        found = replace(found, checkpoint=folder.name, changed=changed, finished=done)
    return found


def _is_final(out: Path, meta: dict[str, Any]) -> bool:
    marker = out / FINISHED
    return (out / "final").is_dir() and marker.is_file() and marker.read_text().strip() == str(meta["iteration"])
