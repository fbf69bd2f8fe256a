"""Checks of a loaded checkpoint: prompts, padding, the stock diffusers pipeline with the same weights and prompt, the VAE, saving.

The stock functions use none of a family's own scaling, packing or caching, so that an error there appears as a difference.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models.base import VelocityModel
from sage_grpo.models.checkpoints.checkpoint import has_component
from sage_grpo.models.devices import autocast
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.policy import Policy, integrate, solve
from sage_grpo.models.schedulers import SchedulerSolver, own_sigmas, prepared, scheduler_shift
from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.tools.doctor.check import Check, Status, graded, relative, rounding
from sage_grpo.training.trainer import Trainer
from sage_grpo.types import Conditioning

SHORT = "a cat"
LONG = "a small gray cat walks slowly over a wooden bridge while rain falls on the quiet river below it"
MIDDLE = torch.tensor(0.7)  # A noise level at which the prompt matters
STEPS = 2  # steps of the clip that is compared with the pipeline's: grids differ at the first and the last step
SMALL = 4 << 30  # bytes of a network that is loaded a second time without asking
KNOWN = ("HunyuanVideo15", "Wan")
"""Beginnings of the names of pipelines whose arguments and latents are known here; tests compare the others with theirs."""


def start(model: VelocityModel) -> Tensor:
    return keyed_noise((1, *model.latent_shape()), "doctor").to(model.device)


@torch.no_grad()
def prompt(model: VelocityModel, x: Tensor, conditions: Sequence[Conditioning]) -> Check:
    first, second = (model.velocity(x[:1], MIDDLE, [one]) for one in conditions[:2])
    gap = relative(second, first)
    status: Status = "pass" if 1e-5 < gap < math.inf else "fail"
    return Check("prompt", status, f"velocities of two prompts differ by {gap:.2g}", gap)


@torch.no_grad()
def padding(model: VelocityModel, x: Tensor, images: Sequence[Tensor | None]) -> Check:
    short, long = model.encode([SHORT, LONG], [images[0]] * 2)
    lengths = [[len(tensor) for tensor in one.tensors.values()] for one in (short, long)]
    pair = x[:1].expand(2, *x.shape[1:]).contiguous()
    alone = model.velocity(pair[:1], MIDDLE, [short])
    beside = model.velocity(pair, MIDDLE, [short, long])[:1]
    gap, limit = relative(beside, alone), rounding(getattr(torch, model.spec.dtype))
    if isinstance(model, FamilyModel) and not model.traits.padded and lengths[0] == lengths[1]:
        letters = f"prompts of {len(SHORT)} and {len(LONG)} letters"
        return Check("padding", "fail", f"{letters} have encodings of one length, {lengths[0]}", gap)
    value = f"alone and beside a longer prompt the velocity differs by {gap:.2g}"
    return Check("padding", graded(gap, warn=limit, fail=10 * limit), value, gap)


def pipeline(model: FamilyModel, text: str, image: Tensor | None) -> tuple[Check, Tensor]:
    """A rollout without noise against the checkpoint's own pipeline; also returns the pipeline's latents."""
    x = start(model)
    wanted = stock_latents(model, text, image, x, STEPS)
    (condition,) = model.encode([text], [image])
    gap, limit = relative(our_latents(model, condition, x, STEPS), wanted), rounding(model.dtype)
    value = f"after {STEPS} steps at eta = 0 latents differ from the diffusers pipeline's by {gap:.2g}"
    return Check("pipeline", graded(gap, warn=limit, fail=4 * limit), value, gap), wanted


def vae(model: FamilyModel, latents: Tensor) -> Check:
    ours, wanted = model.decode(latents).double(), stock_decode(model, latents).double()
    error = float((ours - wanted).square().mean()) if ours.shape == wanted.shape else math.inf
    psnr = math.inf if error == 0 else -math.inf if not math.isfinite(error) else 10 * math.log10(255**2 / error)
    status: Status = "pass" if psnr >= 45 else "warn" if psnr >= 35 else "fail"
    value = f"decoded clips differ from the VAE's own by {math.sqrt(error):.2g} of 255"
    return Check("vae", status, value, math.sqrt(error))


def save(trainer: Trainer, x: Tensor, conditions: Sequence[Conditioning]) -> Check:
    model = trainer.model
    size = sum(p.numel() * p.element_size() for p in model.network.parameters())
    if not isinstance(model, FamilyModel) or trainer.world.control is not None:
        return Check("save", "skip", "needs a diffusers checkpoint and one process")
    if size > SMALL:
        return Check("save", "skip", f"the network has {size / 2**30:.0f} GiB: not loaded a second time")
    with tempfile.TemporaryDirectory() as folder:
        trainer.export(Path(folder))
        spec, lora = model.spec, model.spec.lora
        spec = replace(spec, path=folder) if lora is None else replace(spec, lora=replace(lora, path=folder))
        again = replace(spec, compile=False).load(model.device)
        with torch.no_grad():
            now, then = (one.velocity(x[:1], MIDDLE, conditions[:1], guidance=1.0) for one in (again, model))
    gap, limit = relative(now, then), rounding(model.dtype)
    value = f"after saving and loading {'the LoRA' if lora else 'the weights'} velocities differ by {gap:.2g}"
    return Check("save", graded(gap, warn=limit / 4, fail=limit), value, gap)


def why_unknown(model: FamilyModel) -> str | None:
    name = model.index["_class_name"]
    known = name.startswith(KNOWN)
    return None if known else f"how a {name} is called is not known here (docs/models.md lists what is tested)"


def why_not_stock(model: FamilyModel) -> str | None:
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
    shift, even = model.shift if shift is None else shift, model.traits.even_sigmas
    if "Euler" in type(model.pipe.scheduler).__name__:
        grid = Schedule(own_sigmas(model.pipe.scheduler, steps, shift, even=even))
        return integrate(Policy(model, Ode(), grid), x, [condition])
    return solve(model, SchedulerSolver(prepared(model.pipe.scheduler, steps, shift, even=even)), x, [condition])


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
