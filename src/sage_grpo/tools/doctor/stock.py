"""Outputs of the stock diffusers pipeline for the same weights and the same prompt, with which `sage-grpo doctor` compares.

Nothing here uses a family's own scaling, packing or caching, so an error there appears as a difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_grpo.models.checkpoints.checkpoint import has_component
from sage_grpo.models.devices import autocast
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.policy import Policy, integrate, solve
from sage_grpo.models.schedulers import SchedulerSolver, scheduler_shift
from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.types import Conditioning

KNOWN = ("HunyuanVideo15", "Wan")
"""Beginnings of the names of pipelines whose arguments and latents are known here; tests compare the others with theirs."""


def why_unknown(model: FamilyModel) -> str | None:
    """The reason why neither latents nor pixels can be compared here; None where they can."""
    name = model.index["_class_name"]
    if name.startswith(KNOWN):
        return None
    return f"how a {name} is called is not known here (docs/models.md says what is tested)"


def why_not_stock(model: FamilyModel) -> str | None:
    """The reason why the stock pipeline cannot be run beside a model; None where it can."""
    wanted, unknown = model.index["_class_name"], why_unknown(model)
    if unknown is not None:
        return unknown
    if type(model.pipe).__name__ != wanted:
        return f"the model runs in a {type(model.pipe).__name__}, its checkpoint names a {wanted}"
    if 0 not in model.pictures and "Hunyuan" in wanted:
        return f"{wanted} derives the size of the clip from the picture"
    return None


@torch.no_grad()
def stock_latents(model: FamilyModel, prompt: str, image: Tensor | None, x: Tensor, steps: int) -> Tensor:
    """Latents of one clip by the checkpoint's own pipeline, from the noise x: its text encoding, grid, guidance and solver."""
    pipe, video = model.pipe, model.video
    for name in model.traits.encoders:
        if has_component(model.index, name):
            model.encoder(name)
    options: dict[str, Any] = {"num_frames": video.frames, "num_inference_steps": steps}
    options |= {"height": video.height, "width": video.width, "output_type": "latent", "return_dict": False}
    if image is not None:
        from PIL import Image

        options["image"] = Image.fromarray(image.cpu().numpy())
    pipe.set_progress_bar_config(disable=True)
    guider = getattr(pipe, "guider", None)
    if guider is None:
        options["guidance_scale"] = model.guidance_scale
        if model.spec.guidance_scale_2 is not None:
            options["guidance_scale_2"] = model.spec.guidance_scale_2
    else:
        before = guider.guidance_scale
        guider.guidance_scale = model.guidance_scale - (1.0 if guider.use_original_formulation else 0.0)
    try:
        with autocast(model.spec, model.device, model.dtype):
            prompts = {"prompt": [prompt], "negative_prompt": [model.spec.negative_prompt]}
            return pipe(**prompts, latents=x.clone(), **options)[0].to(torch.float32)
    finally:
        if guider is not None:
            guider.guidance_scale = before


@torch.no_grad()
def our_latents(model: FamilyModel, condition: Conditioning, x: Tensor, steps: int) -> Tensor:
    """The same clip by our own code: the ODE of a rollout where the checkpoint's solver is Euler's, else the checkpoint's solver."""
    shift = scheduler_shift(model.pipe.scheduler.config, model.tokens)
    if "Euler" in type(model.pipe.scheduler).__name__:
        return integrate(Policy(model, Ode(), Schedule(model.schedule.sigmas(steps, shift))), x, [condition])
    return solve(
        model, SchedulerSolver(model.schedule.scheduler(steps, model.shift if shift is None else shift)), x, [condition]
    )


@torch.no_grad()
def stock_decode(model: FamilyModel, latents: Tensor) -> Tensor:
    """Latents to uint8 clips B x F x H x W x 3 with the scaling that the VAE's configuration states, as pipelines do."""
    vae, config = model.pipe.vae, model.pipe.vae.config
    z = latents.to(next(vae.parameters()).device, vae.dtype)
    if config.get("latents_mean") is not None:
        mean, std = (torch.tensor(config[name]).to(z).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        z = z * std + mean
    else:
        z = z / config.scaling_factor
    pixels = vae.decode(z, return_dict=False)[0].to(torch.float32)
    frames = model.pipe.video_processor.postprocess_video(pixels, output_type="pt")
    return (frames * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).cpu()
