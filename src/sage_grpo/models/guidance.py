"""Classifier-free guidance, in the variants of diffusers' pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.files import read_if_there
from sage_grpo.models.distilled import find_distilled
from sage_grpo.models.spec import ModelSpec

TOGETHER = 4096
"""On CUDA both branches are one batch up to so many tokens; beyond, the GPU is busy and gains nothing by more rows."""


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """The combination of the conditional and the negative velocity."""

    scale: float | None = None
    """The checkpoint's scale s in v_negative + s (v - v_negative); 1 is none; None where it names none."""
    rescale: float = 0.0
    """Share of the guided velocity that gets the conditional one's std (arXiv 2305.08891, section 3.4)."""
    renormalize: int | None = None
    """The guided velocity gets the conditional one's norm, token by token; a token is a square of so many latents a side."""
    embedded: bool = False  # the scale is an input of the network (distilled guidance): one pass and no negative prompt

    def combine(self, v: Tensor, v_negative: Tensor, scale: float) -> Tensor:
        guided = v_negative + scale * (v - v_negative)
        if self.renormalize is not None:
            return guided * (token_norm(v, self.renormalize) / token_norm(guided, self.renormalize))
        if self.rescale == 0:
            return guided
        dims = list(range(1, v.ndim))
        ratio = v.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
        return self.rescale * (guided * ratio) + (1 - self.rescale) * guided


def runs_together(device: torch.device, tokens: int) -> bool:
    return device.type == "cuda" and tokens <= TOGETHER


def run_both(
    run: Callable[[Tensor, Sequence[Mapping[str, Tensor]]], Tensor],
    x: Tensor,
    inputs: Sequence[Mapping[str, Tensor]],
    negatives: Sequence[Mapping[str, Tensor]],
    tokens: int,
    *,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Velocities of the prompts and of the negative prompts; `gradient` lets it go through the second as well."""
    if runs_together(x.device, 2 * len(x) * tokens):
        v, v_negative = run(torch.cat([x, x]), [*inputs, *negatives]).chunk(2)
        return v, v_negative if gradient else v_negative.detach()
    if gradient:
        v, v_negative = one_after_another(run(x, inputs), run(x, negatives))
        return v, v_negative
    with torch.no_grad():  # first, before the other branch keeps activations
        v_negative = run(x, negatives)
    return run(x, inputs), v_negative


def one_after_another(*outputs: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, whose graphs a backward pass runs through one at a time. In a joint backward pass a weight that two forward passes read waits
    for both of its gradients: 31 GiB more for HunyuanVideo-1.5. Gradients reach parameters through `backward` only, not through
    `torch.autograd.grad`."""
    if not any(output.requires_grad for output in outputs):
        return outputs
    return _OneAfterAnother.apply(outputs, *(output.detach().requires_grad_() for output in outputs))  # type: ignore[no-untyped-call]


class _OneAfterAnother(torch.autograd.Function):
    """Identity; `outputs` have the graphs, `heads` are their detached values."""

    @staticmethod
    def forward(ctx: Any, outputs: tuple[Tensor, ...], *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.outputs = outputs
        return tuple(head.view_as(head) for head in heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        for output, gradient in zip(ctx.outputs, gradients):
            torch.autograd.backward(output, gradient)
        return (None,) * (1 + len(gradients))


def token_norm(v: Tensor, side: int) -> Tensor:
    """The norm of every token's values, at every latent of the token; v is B x C x F x H x W."""
    squares = v.square().sum(1, keepdim=True).unflatten(-1, (-1, side)).unflatten(-3, (-1, side))
    norm = squares.sum((-3, -1)).sqrt()
    return norm.repeat_interleave(side, -1).repeat_interleave(side, -2)


def read_guidance(folder: Path, index: Mapping[str, Any]) -> Guidance:
    entry = index.get("guider")
    if entry is None or entry[0] is None:
        return Guidance()
    if entry[1] != "ClassifierFreeGuidance":
        raise ModelError(
            f'The guider of "{folder}" is a {entry[1]}; supported is ClassifierFreeGuidance. Save the pipeline with '
            "that, or set guidance to none with ClassifierFreeGuidance(guidance_scale=1.0)."
        )
    config = read_if_there(folder / "guider" / "guider_config.json")
    start, stop = config.get("start", 0.0), config.get("stop", 1.0)
    if not config.get("enabled", True):
        return Guidance(scale=1.0)
    if (start, stop) != (0.0, 1.0):
        raise ModelError(
            f'guider/guider_config.json of "{folder}" guides from start {start} to stop {stop} of the steps; supported is '
            "guidance at all steps (start 0, stop 1). Change it there."
        )
    scale = float(config.get("guidance_scale", 7.5))
    # v + s (v - v_negative) is v_negative + (s + 1) (v - v_negative).
    scale += 1.0 if config.get("use_original_formulation", False) else 0.0
    return Guidance(scale=scale, rescale=float(config.get("guidance_rescale", 0.0)))


def check_guidance(spec: ModelSpec, folder: Path, index: Mapping[str, Any]) -> None:
    read_guidance(folder, index)
    if spec.guidance_scale_2 is not None and index.get("boundary_ratio") is None:
        raise ModelError(
            f'model.guidance_scale_2 is {spec.guidance_scale_2:g}, but "{folder}" has no second expert (model_index.json '
            "names no boundary_ratio). Leave it out and set model.guidance_scale."
        )


def warn_if_distilled(spec: ModelSpec, guidance: Guidance, scale: float) -> None:
    distilled = find_distilled(spec)
    advice = None if distilled is None or guidance.embedded else distilled.advice(scale)
    if advice is not None:
        warnings.warn(advice, stacklevel=3)
