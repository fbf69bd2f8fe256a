"""The trained parameters of a family: all that a gradient reaches, or a LoRA."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.models import lora
from sage_grpo.models.network.gradients import empty, unread_queries, without_gradient
from sage_grpo.models.traits import Traits


def blocks_of(transformer: Any, traits: Traits) -> list[nn.Module]:
    return [block for name in traits.blocks for block in getattr(transformer, name)]


def unread_parameters(model: Any, transformer: Any) -> set[str]:
    """Parameters of a transformer that never receive a gradient, read off a run of one sample; none where `Traits.inputs` is empty.

    Those of optional inputs, such as quoted text, are not counted.
    """
    blocks = model.traits.blocks
    if not model.traits.inputs:
        return set()

    def run(copied: Any) -> Tensor:
        trial = copy(model)
        trial.spec = replace(model.spec, train=True, lora=None)  # in float32
        trial.transformer, trial.network, trial.others = copied, model._adapted(copied), []
        inputs = {name: tensor[None] for name, tensor in model.batchable(model._trial_inputs()).items()}
        sigma = torch.tensor(0.0 if model.experts.components == ("transformer_2",) else 1.0)
        return trial._forward(empty(1, *model.latent_shape()), sigma, empty(1), inputs)

    needs_image = 0 not in model.pictures
    traced = without_gradient(transformer, blocks, run, (type(model).__name__, needs_image))
    return traced | unread_queries(transformer, blocks) | model.unused


def prepare_training(model: Any) -> set[str]:
    """Freeze all but the trained parameters, and add the LoRA; returns the parameters of `transformer` that nothing reads."""
    spec, adapts = model.spec, model.spec.train or model.spec.lora is not None
    unread = unread_parameters(model, model.transformer) if adapts else set()
    for module in (*model.modules("network"), *model.modules("vae")):
        module.requires_grad_(False)
        module.eval()
    for component, transformer in model.experts.trained.items() if adapts else ():
        dead = unread if transformer is model.transformer else unread_parameters(model, transformer)
        if spec.lora is not None:
            names = lora.match_targets(transformer, model.lora_targets, model.traits.blocks, dead)
            lora.add_lora(transformer, spec.lora, names, model.experts.noise(component), dead)
        for name, parameter in transformer.named_parameters():
            trained = lora.is_lora(name) if spec.lora is not None else name not in dead
            parameter.requires_grad_(spec.train and trained)
    return unread
