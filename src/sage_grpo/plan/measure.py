"""A one-minute measurement on this machine: blocks of the real size and one decode, with random weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from sage_grpo.models import ModelError
from sage_grpo.models.family import FamilyModel
from sage_grpo.plan import formulas
from sage_grpo.plan.architecture import Architecture
from sage_grpo.plan.configs import random_model
from sage_grpo.plan.costs import forecast
from sage_grpo.plan.formulas import NetworkShape, Rates, RunShape
from sage_grpo.plan.hardware import Hardware
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.memory import levels
from sage_grpo.training.offload import get_ready, same_bits

MORE = 2
"""Difference in blocks between the two measured networks: the time outside of the blocks cancels."""


def measured(config: TrainConfig, architecture: Architecture, hardware: Hardware) -> Hardware:
    """Correct the hardware's rates by measured times of blocks and a decode of this configuration."""
    network, known = architecture.network, architecture.model
    if network is None or known is None:
        raise ModelError(
            f"--measure builds blocks of a known family, and {architecture.family} is your own: leave it out."
        )
    spec = replace(
        config.model, cache=None, guidance_scale=1.0, guidance_scale_2=None, path=None, family=architecture.family,
        compile=False, frames=known.video.frames, height=known.video.height, width=known.video.width, fps=known.video.fps,
    )  # fmt: skip
    job = replace(
        forecast(config, hardware, architecture=architecture).job,
        micro_batch=1,
        guidance=False,
        compiled=False,
        keep=(("attention", 1),),
    )
    get_ready(wanted=spec.deterministic)
    times: list[tuple[float, float]] = []
    decode: float | None = None
    for layers in (1, 1 + MORE):
        model = random_model(
            architecture.family,
            spec,
            transformer=known.transformer.config,
            vae=known.pipe.vae.config,
            text_tokens=architecture.text_tokens,
            layers=layers,
            device=spec.device,
        )
        model.keep(levels("attention", len(model.blocks()), cuda=True))  # the formulas scale this to any mix of levels
        times.append(_block_times(model))
        kinds = len(model.traits.blocks)  # blocks of each kind run, and the formulas use their mean
        decode = _decode_time(model) if layers == 1 else decode
        del model
    forward, both = (_block(a, b) / kinds for a, b in zip(*times))
    rates = fitted(network, job, hardware.rates, forward=forward, backward=both - forward, decode=decode)
    note = "" if decode is not None else "; decoding did not fit, its time is the table's"
    return replace(hardware, rates=rates, origin=f"measured just now on this machine{note}")


def _block(few: float, more: float) -> float:
    """Seconds of a block; if noise hides the difference, its share of the whole."""
    share = more / (1 + MORE)
    return max((more - few) / MORE, share / 10)


def fitted(
    network: NetworkShape, job: RunShape, rates: Rates, *, forward: float, backward: float, decode: float | None
) -> Rates:
    """Rates with which the formulas reproduce the measured seconds of one block's passes, and of a decode."""
    one = replace(network, blocks=1)
    rates = replace(rates, forward=1.0, backward=1.0, decode=1.0, launch=0.0, eager=0.0)
    rates = replace(rates, forward=forward / formulas.forward_seconds(one, job, rates))
    single = formulas.backward_seconds(one, job, rates)
    plain = formulas.backward_seconds(one, job, replace(rates, backward=2.0)) - single
    rates = replace(rates, backward=max(0.1, (backward - (single - plain)) / plain))
    if decode is None:
        return rates
    return replace(rates, decode=decode / formulas.decode_seconds(network, job, rates))


def _block_times(model: FamilyModel) -> tuple[float, float]:
    """Seconds of a forward pass, and of a forward and a backward pass."""
    x = torch.randn(1, *model.latent_shape(), device=model.device)
    sigma, conditions = torch.tensor(0.7), model.encode(["a prompt"])

    def forward() -> None:
        with torch.no_grad():
            model.velocity(x, sigma, conditions)

    def both() -> None:
        v = model.velocity(x, sigma, conditions)
        with same_bits(model.device, wanted=model.spec.deterministic):
            v.backward(torch.ones_like(v))
        model.network.zero_grad(set_to_none=True)

    return _seconds(forward, model.device), _seconds(both, model.device)


def _decode_time(model: FamilyModel) -> float | None:
    latents = torch.randn(1, *model.latent_shape(), device=model.device)
    try:
        return _seconds(lambda: model.decode(latents), model.device, repeat=1)
    except torch.OutOfMemoryError:
        return None


def _seconds(run: Callable[[], object], device: torch.device, repeat: int = 3) -> float:
    """The shortest of some calls after a warm-up."""
    best = float("inf")
    for number in range(repeat + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = time.perf_counter() - begin if number == 0 else min(best, time.perf_counter() - begin)
    return best
