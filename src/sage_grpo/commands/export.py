"""Write a checkpoint of a run as weights that load into diffusers: a LoRA, a merged model or full weights, with a model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sage_grpo.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to export."""

    run: str = ""
    """Folder of a run."""
    checkpoint: int | None = None
    """Iteration of the checkpoint; None is the newest good one."""
    ema: bool = False
    """Take the moving average of the weights."""
    merged: bool = False
    """Fold a LoRA into the base model and write the whole model."""
    out: str = "export"
    """Folder to write."""


def run(options: Options) -> int:
    """Export."""
    from sage_grpo.commands.run_folder import find_checkpoint
    from sage_grpo.train.state import load_weights

    config = read_config(Path(options.run))
    folder = find_checkpoint(Path(options.run), options.checkpoint)
    model = config.model.load()
    weights = load_weights(folder, model.trainable(), ema=options.ema)
    model.save(options.out, weights=weights, merged=options.merged)
    print(f"Wrote {options.out} from {folder}{' (EMA)' if options.ema else ''}.")
    return 0


def read_config(run: Path) -> TrainConfig:
    """The configuration that a run was started with."""
    from sage_grpo.configure import parse
    from sage_grpo.train.config import TrainConfig

    file = run / "config.yaml"
    if not file.is_file():
        raise FileNotFoundError(
            f"{run or '.'} is not the folder of a run: it has no config.yaml. Give --run runs/NAME."
        )
    return parse(TrainConfig, ["--config", str(file)], prog="sage-grpo")
