"""Passes of stock diffusers: the transformer's own forward, a LoRA through peft, gradient checkpointing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import meter as meters
import torch
import weights
from job import Job

from sage_grpo.models.checkpoints.from_configs import plain, weightless
from sage_grpo.models.lora import match_targets
from sage_grpo.models.spec import ModelSpec
from sage_grpo.plan.published import Configs

TEXT_TOKENS = 100
"""Valid tokens of HunyuanVideo-1.5's text, which it pads to 1000."""


def run(content: dict[str, Any], job: Job, options: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Fill in the figures."""
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    tiny, device = options["tiny"], weights.device()
    if options["model"] == "wan":
        folder = weights.wan(Path(options["work"]) / "wan", tiny=tiny)
        network = WanTransformer3DModel.from_pretrained(folder / "transformer", torch_dtype=weights.dtype(tiny))
        model = weightless(ModelSpec(), folder)
        arguments = wan_inputs(network.to(device).config, job, options)
    else:
        network = weights.hunyuan15_transformer(tiny=tiny)
        with tempfile.TemporaryDirectory() as configs:
            vae = {"latent_channels": (network.config.in_channels - 1) // 2}
            Configs(family="hunyuan15", transformer=plain(network.config), vae=vae).write(Path(configs))
            model = weightless(ModelSpec(), Path(configs))
        arguments = hunyuan15_inputs(network.config, job, options)
    network.requires_grad_(False)
    targets = match_targets(network, model.lora_targets, model.traits.blocks, model.unread)
    network.add_adapter(LoraConfig(r=job.rank, lora_alpha=job.rank, target_modules=sorted(targets)))
    network.enable_gradient_checkpointing()
    content["settings"] = options["settings"]
    if options["settings"].get("compile"):
        network.compile_repeated_blocks(dynamic=False)
    content["lora"] = meters.lora_report({name: p for name, p in network.named_parameters() if p.requires_grad})
    note("loaded")
    content["passes"] = meters.measure_passes(passes(network, arguments, job.guidance), until=options["seconds"])


def passes(network: Any, arguments: Mapping[str, Any], guidance: float) -> dict[str, Callable[[], None]]:
    """The same passes as ours."""

    def velocity(branches: int) -> torch.Tensor:
        outputs = [network(**arguments, return_dict=False)[0].float() for _ in range(branches)]
        return outputs[0] if branches == 1 else outputs[1] + guidance * (outputs[0] - outputs[1])

    def forward(branches: int) -> None:
        with torch.no_grad():
            velocity(branches)

    def training(branches: int) -> None:
        v = velocity(branches)
        v.backward(torch.ones_like(v))
        network.zero_grad(set_to_none=True)

    return {
        "forward": lambda: forward(1),
        "training_pass": lambda: training(1),
        "guided_forward": lambda: forward(2),
        "guided_training_pass": lambda: training(2),
    }


def wan_inputs(config: Any, job: Job, options: Mapping[str, Any]) -> dict[str, Any]:
    """Latents and text as the pipeline shapes them."""
    kind = {"device": weights.device(), "dtype": weights.dtype(options["tiny"])}
    return {
        "hidden_states": torch.randn(1, 16, (job.frames - 1) // 4 + 1, job.height // 8, job.width // 8, **kind),
        "timestep": torch.full((1,), 900.0, device=kind["device"]),
        "encoder_hidden_states": torch.randn(1, 512, config.text_dim, **kind),
    }


def hunyuan15_inputs(config: Any, job: Job, options: Mapping[str, Any]) -> dict[str, Any]:
    """Latents, text, glyphs and picture as the pipeline shapes them for text-to-video."""
    kind = {"device": weights.device(), "dtype": weights.dtype(options["tiny"])}
    space, padded, glyphs, picture = (8, 120, 8, 8) if options["tiny"] else (16, 1000, 256, 729)
    mask = torch.zeros(1, padded, dtype=torch.int64, device=kind["device"])
    mask[:, :TEXT_TOKENS] = 1
    latents = ((job.frames - 1) // 4 + 1, job.height // space, job.width // space)
    return {
        "hidden_states": torch.randn(1, config.in_channels, *latents, **kind),
        "timestep": torch.full((1,), 900.0, **kind),
        "encoder_hidden_states": torch.randn(1, padded, config.text_embed_dim, **kind),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": torch.zeros(1, glyphs, config.text_embed_2_dim, **kind),
        "encoder_attention_mask_2": torch.zeros(1, glyphs, dtype=torch.int64, device=kind["device"]),
        "image_embeds": torch.zeros(1, picture, config.image_embed_dim, **kind),
    }
