"""Make a world's model: VAE, then latents, then flow, then an ordinary diffusers folder, then its scores; a world says how each is done."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch

from sage_grpo.inside import replace_text
from sage_grpo.worlds.making.autoencoder import Codec, psnr
from sage_grpo.worlds.making.imperfect import Clips
from sage_grpo.worlds.making.options import StageOptions
from sage_grpo.worlds.making.saving import command, listing
from sage_grpo.worlds.making.score import score
from sage_grpo.worlds.making.training import OutOfTime
from sage_grpo.worlds.world import World


class Maker(ABC):
    """How the model of one world is made. `vae` is the stock class in all methods."""

    world: ClassVar[World]
    clips: ClassVar[Clips]
    card: ClassVar[str]
    """The model card, with places for {command}, {listing} and {table}."""

    @abstractmethod
    def build_vae(self) -> Any:
        """A fresh VAE."""

    @abstractmethod
    def load_vae(self, folder: Path, device: torch.device) -> Any:
        """A VAE from its own folder or from a pipeline's."""

    @abstractmethod
    def codec(self, vae: Any) -> Codec:
        """The VAE as training uses it."""

    @abstractmethod
    def train_vae(self, vae: Any, until: float) -> float:
        """Train in place; return the PSNR on clean unseen clips."""

    @abstractmethod
    def make_flow(self, vae: Any, folder: Path, device: torch.device, until: float) -> None:
        """Encode the data, train the flow on it and write the pipeline."""

    @abstractmethod
    def sizes(self) -> object:
        """The sizes of the networks, for the card."""


def pretrain(options: StageOptions, maker: Maker) -> int:
    """Run all stages, or as far as the minutes of this call go; return 0."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _single_precision(device, exact=False)
    torch.backends.cudnn.benchmark = device.type == "cuda"
    if options.compile and device.type == "cuda":
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    until = started + 60 * options.call_minutes if options.call_minutes else math.inf
    folder = options.out / "pipeline"
    try:
        vae, quality = _vae_stage(options, maker, device, until)
        say(started, f"the VAE reaches {quality:.2f} dB on unseen clean clips")
        maker.make_flow(vae, folder, device, until)
    except OutOfTime as stopped:
        say(started, f"{stopped}: this call's minutes are over. The same command with --pretrain.resume true goes on.")
        return 0
    say(started, f"wrote {folder}")
    if options.score_prompts:
        _single_precision(device, exact=True)  # as a CPU would
        prompts, steps = options.score_prompts, options.score_steps
        table = score(maker.world, folder, prompts=prompts, steps=steps, pictures=options.out, device=device)
        facts = listing(maker.world, options, maker.sizes(), quality)
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


def _vae_stage(options: StageOptions, maker: Maker, device: torch.device, until: float) -> tuple[Any, float]:
    own = options.out / "vae"
    # With a state, a resumed stage trains on for what is left of its (perhaps longer) budget.
    finished = options.resume and (own / "config.json").is_file() and not (options.states / "vae.safetensors").exists()
    ready = options.vae or (own if finished else None)
    if ready is not None:
        vae = maker.load_vae(ready, device)
        generator = torch.Generator().manual_seed(options.seed)
        return vae, psnr(maker.codec(vae), maker.clips.clean(256 if device.type == "cuda" else 8, generator, device))
    vae = maker.build_vae().to(device) if options.vae_start is None else maker.load_vae(options.vae_start, device)
    vae.requires_grad_(True).train()
    quality = maker.train_vae(vae, until)
    vae.save_pretrained(own)
    return vae, quality
