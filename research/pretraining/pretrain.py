"""Make a world's model: VAE, then latents, then flow, then an ordinary diffusers folder, then its scores; a world says how each is done."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from research.pretraining.autoencoder import Codec, psnr
from research.pretraining.imperfect import Clips
from research.pretraining.saving import command, listing, save_pipeline
from research.pretraining.score import score
from sage_grpo.config.parsing import ConfigError
from sage_grpo.models.checkpoints.checkpoint import load_component, load_pipeline, read_index
from sage_grpo.utils.pretrained import from_pretrained
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.worlds.world import PromptWorld

BLOCK = re.compile(r"((?:transformer_)?blocks)\.(\d+)\.")
"""The weights of one of a transformer's blocks."""


@dataclass(frozen=True, kw_only=True)
class Maker:
    """How the model of one world is made: its data, its networks and what trains them. `options` are those of the world's pretraining."""

    world: PromptWorld
    model: Callable[[], Path]
    """The folder of the world's own model."""
    clips: Clips
    card: str
    """The model card, with places for {command}, {listing} and {table}."""
    pipeline: str
    """Class of the pipeline in diffusers."""
    vae: str
    """Class of the VAE in diffusers."""
    build_vae: Callable[[Any], Any]
    """A fresh VAE of these sizes."""
    codec: Callable[[Any], Codec]
    """The VAE as training uses it."""
    train_vae: Callable[[Any, Any], float]
    """(VAE, options): train in place; return the PSNR on clean unseen clips."""
    tokenizer: Callable[[], Any]
    """The tokenizer of the world's words."""
    networks: Callable[[Any, Any], tuple[Any, Any]]
    """(sizes, tokenizer): a fresh transformer and a fresh text encoder."""
    encode_pool: Callable[[Any, Any, Any, torch.Generator], Any]
    """(VAE, tokenizer, options, generator): the flow's data, encoded."""
    train_flow: Callable[..., None]
    """(VAE, transformer, text encoder, tokenizer, pool, options): train both networks in place."""
    assemble: Callable[..., Any]
    """(VAE, transformer, text encoder, tokenizer, shift): the pipeline."""

    def load_vae(self, folder: Path, device: torch.device) -> Any:
        """A VAE from its own folder or from a pipeline's."""
        import diffusers

        inner = folder / "vae" if (folder / "vae").is_dir() else folder
        if not (inner / "config.json").is_file():
            raise FileNotFoundError(f"No VAE in {folder}: expected config.json in it or in its folder vae/.")
        return from_pretrained(getattr(diffusers, self.vae), inner).to(device, torch.float32)

    def start(self, options: Any) -> tuple[Any, Any] | None:
        """The transformer and the text encoder that the flow starts from, or None."""
        import diffusers

        if options.start is None:
            return None
        if not (options.start / "model_index.json").is_file():
            raise FileNotFoundError(
                f"--pretrain.start {options.start} is no pipeline folder: it has no model_index.json."
            )
        pipe = load_pipeline(getattr(diffusers, self.pipeline), options.start, skip=["text_encoder"], dtypes={})
        transformer = begun(self.networks(options.sizes(), self.tokenizer())[0], pipe.transformer)
        return transformer, load_component(options.start, read_index(options.start), "text_encoder", torch.float32)

    def make_flow(self, vae: Any, options: Any, folder: Path, start: tuple[Any, Any] | None) -> None:
        """Encode the data, train the flow on it and write the pipeline."""
        tokenizer = self.tokenizer()
        networks = start or self.networks(options.sizes(), tokenizer)
        transformer, text_encoder = (one.to(vae.device, torch.float32).requires_grad_(True).train() for one in networks)
        started = time.perf_counter()
        pool = self.encode_pool(vae, tokenizer, options, torch.Generator().manual_seed(options.seed + 1))
        millions = sum(parameter.numel() for parameter in transformer.parameters()) / 1e6
        say(started, f"encoded {options.flow_clips} clips; the transformer has {millions:.1f} million parameters")
        self.train_flow(vae, transformer, text_encoder, tokenizer, pool, options)
        self.save(vae, transformer, text_encoder, tokenizer, folder, options.shift)

    def save(self, vae: Any, transformer: Any, text_encoder: Any, tokenizer: Any, folder: Path, shift: float) -> None:
        """Write the pipeline, a copy in half precision."""
        copies = (deepcopy(one).cpu().half().eval() for one in (vae, transformer, text_encoder))
        save_pipeline(self.assemble(*copies, tokenizer, shift), folder, self.world, shift)


def begun(fresh: Any, trained: Any) -> Any:
    """The fresh transformer with the weights of a trained one; where that has more blocks, every so many of them is taken, the first and the last always."""
    state: dict[str, torch.Tensor] = trained.state_dict()
    blocks = sorted({int(found[2]) for found in map(BLOCK.match, state) if found})
    wanted = len({int(found[2]) for found in map(BLOCK.match, fresh.state_dict()) if found})
    if wanted > len(blocks):
        raise ConfigError(
            f"--pretrain.start has {len(blocks)} blocks, --pretrain.blocks asks for {wanted}: ask for at most {len(blocks)}."
        )
    taken = [blocks[round(place * (len(blocks) - 1) / max(1, wanted - 1))] for place in range(wanted)]
    places = {str(block): str(place) for place, block in enumerate(taken)}
    kept = {}
    for name, tensor in state.items():
        found = BLOCK.match(name)
        if found is None:
            kept[name] = tensor
        elif found[2] in places:
            kept[f"{found[1]}.{places[found[2]]}.{name[found.end() :]}"] = tensor
    try:
        fresh.load_state_dict(kept)
    except RuntimeError as error:
        raise ConfigError(
            "--pretrain.start has other sizes than this call: give its own --pretrain.heads and --pretrain.latent_channels, or leave it out. "
            f"{str(error).splitlines()[1].strip()}"
        ) from error
    return fresh


def pretrain(options: Any, maker: Maker) -> int:
    """Run all stages; return 0."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _single_precision(device, exact=False)
    torch.backends.cudnn.benchmark = device.type == "cuda"
    if options.compile and device.type == "cuda":
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    folder = options.out / "pipeline"
    start = maker.start(options)  # what does not fit is told before minutes of a VAE
    vae, quality = _vae_stage(options, maker, device)
    say(started, f"the VAE reaches {quality:.2f} dB on unseen clean clips")
    maker.make_flow(vae, options, folder, start)
    say(started, f"wrote {folder}")
    if options.score_prompts:
        _single_precision(device, exact=True)  # as a CPU would
        prompts, steps = options.score_prompts, options.score_steps
        table = score(maker.world, folder, prompts=prompts, steps=steps, pictures=options.out, device=device)
        facts = listing(maker.world, options, options.sizes(), quality)
        text = maker.card.format(table=table, listing=facts, command=command(maker.world, options))
        replace_text(folder / "README.md", text)
        say(started, f"scores in {options.out / 'scores.json'}")
    return 0


def say(since: float, text: str) -> None:
    """Print a line with the seconds that have passed."""
    print(f"[{time.perf_counter() - since:6.1f} s] {text}", flush=True)


def _single_precision(device: torch.device, *, exact: bool) -> None:
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not exact


def _vae_stage(options: Any, maker: Maker, device: torch.device) -> tuple[Any, float]:
    if options.vae is not None:
        vae = maker.load_vae(options.vae, device)
        generator = torch.Generator().manual_seed(options.seed)
        return vae, psnr(maker.codec(vae), maker.clips.clean(256 if device.type == "cuda" else 8, generator, device))
    vae = (
        maker.build_vae(options.sizes()).to(device)
        if options.vae_start is None
        else maker.load_vae(options.vae_start, device)
    )
    vae.requires_grad_(True).train()
    quality = maker.train_vae(vae, options)
    vae.save_pretrained(options.out / "vae")
    return vae, quality
