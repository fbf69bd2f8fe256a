"""Write a checkpoint of a run as weights that load into diffusers: a LoRA, a merged model or full weights, with a model card."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
    dtype: Literal["float32", "bfloat16"] | None = None
    """What to store weights in. None: the run's `model.dtype` for a whole model, float32 for a LoRA. Modules that the family
    keeps in float32 (Wan's norms and time embedding) stay so."""
    out: str = "export"
    """Folder to write."""


def run(options: Options) -> int:
    """Export."""
    from sage_grpo.commands.run_folder import find_checkpoint
    from sage_grpo.train.state import load_weights

    config = read_config(Path(options.run))
    folder = find_checkpoint(Path(options.run), options.checkpoint)
    spec = config.model if options.dtype is None else replace(config.model, dtype=options.dtype)
    model = spec.load()
    weights = load_weights(folder, model.trainable(), ema=options.ema)
    if options.dtype == "bfloat16" and spec.lora is not None and not options.merged:
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
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
