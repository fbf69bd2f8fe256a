"""What the blocks of a loaded model keep for their backward pass: by the same forecast that `sage-grpo plan` shows."""

from __future__ import annotations

from sage_grpo.forecast.costs import forecast
from sage_grpo.forecast.hardware import here
from sage_grpo.forecast.keeping import kept, levels
from sage_grpo.models.base import Explains, VelocityModel
from sage_grpo.parallel.world import World
from sage_grpo.training.config import TrainConfig
from sage_grpo.types import Keep


def keep_what_fits(config: TrainConfig, model: VelocityModel, world: World) -> None:
    """Set what the model's blocks keep, and note it where the model says what was decided."""
    chosen = choose_levels(config, model, world)
    model.keep(chosen)
    if isinstance(model, Explains):
        model.choices["blocks keep"] = kept(chosen)


def choose_levels(config: TrainConfig, model: VelocityModel, world: World) -> list[Keep]:
    """A level for every block. It goes by the size of the GPU, not by what is free at the moment: a run that is continued does as before."""
    asked, blocks, cuda = config.update.gradient_checkpointing, len(model.blocks()), model.device.type == "cuda"
    if asked == "auto" and cuda:
        found = forecast(config, here(world.processes), gpus=world.processes).levels
        if len(found) == blocks:
            return found
    return levels(asked, blocks, cuda=cuda)
