"""The model part of a configuration. Imports nothing heavy; `load()` does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

from sage_grpo.config.metadata import Content, Machine, Speed, Training, Values
from sage_grpo.config.ranges import Count, Finite, Fps, Positive, Range, Seed, check_prompt, checked
from sage_grpo.models import ModelError
from sage_grpo.utils.imports import NoSuchModule, import_named, is_object, is_there, refuse_object
from sage_grpo.utils.pretrained import MOST_ALPHA
from sage_grpo.utils.suggest import did_you_mean

if TYPE_CHECKING:
    import torch

    from sage_grpo.models.base import VelocityModel

FAMILIES = ("hunyuan15", "wan", "ltx", "ltx2", "flux", "flux2", "sd3", "qwen_image", "qwen_image_edit", "z_image")
"""Families that ship with the package; each is the module of this name beside this file."""


@checked
class LoraSpec:
    """A low-rank adapter (LoRA)."""

    rank: Count = 32
    """Rank of the adapter."""
    alpha: Annotated[float, Range(0, MOST_ALPHA, open_below=True)] | None = None
    """Scale; updates are multiplied by alpha / rank. None is alpha = rank."""
    targets: list[str] = field(default_factory=list)
    """Linear modules to adapt, such as "attn.to_q" or "ff.*"; empty is attention and feed-forward layers."""
    seed: Seed = 0
    """Seed of the adapter's initial weights."""
    path: Values[str | None] = None
    """A saved LoRA of the same shape to start from: a folder, or owner/name@COMMIT."""


@checked
class AdapterSpec:
    """A frozen LoRA that becomes part of the base model."""

    path: str
    """A folder, or owner/name@COMMIT on the hub; safetensors only."""
    file: str = "pytorch_lora_weights.safetensors"
    """File name, in any layout that diffusers loads."""
    scale: Finite = 1.0
    """Factor on its update."""
    expert: Literal["high", "low"] | None = None
    """Wan 2.2 with two experts: the expert that it belongs to."""

    def __post_init__(self) -> None:
        if not self.path or not self.file.endswith(".safetensors"):
            raise ModelError(
                f'model.adapters: path "{self.path}" and file "{self.file}": name a folder (or owner/name@COMMIT) and a .safetensors file in it.'
            )


@checked
class ModelSpec:
    """The diffusers checkpoint and how to run it."""

    path: Content[str | None] = None
    """A local diffusers folder or a hub id; None or shapes is the included miniature model."""
    revision: Content[str | None] = None
    """Branch, tag or commit of a hub id."""
    family: str | None = None
    """Model family (hunyuan15, wan, ltx2, ...) or your module's import path; None reads it from the checkpoint."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the network; use float32 on a CPU."""
    vae_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the VAE; None is dtype on CUDA and float32 elsewhere."""
    device: Speed[str] = "auto"
    """auto, cpu, cuda or cuda:N."""
    train: Training[bool] = True
    """false loads for inference only."""
    lora: Training[LoraSpec | None] = None
    """Train a LoRA; None trains all weights. What is trained is float32."""
    guidance_scale: Annotated[float, Range(1)] | None = None
    """Guidance scale, classifier-free or distilled; 1 is none, None is the checkpoint's."""
    guidance_scale_2: Annotated[float, Range(1)] | None = None
    """Guidance scale of Wan 2.2's second expert; None is guidance_scale."""
    negative_prompt: str = ""
    """Prompt of the unconditional branch."""
    guidance_in_training: Training[bool] = True
    """Use guidance in rollouts and updates too, as the paper does."""
    negative_gradient: Training[bool] = True
    """Backpropagate through the negative prompt's pass too; false saves memory and time (docs/speed.md)."""
    frames: Count | None = None
    """Frames per clip, usually 4k + 1; None is the checkpoint's default."""
    height: Count | None = None
    """Height in pixels."""
    width: Count | None = None
    """Width in pixels."""
    fps: Fps | None = None
    """Frames per second."""
    shift: Positive | None = None
    """Shift of the noise schedule; None is the checkpoint's."""
    sigmas: list[Annotated[float, Range(0, 1, open_below=True)]] = field(default_factory=list)
    """Starting noise levels of the steps, for distilled checkpoints: [1, 0.9, 0.75, 0.5]. Empty uses the
    scheduler's."""
    adapters: list[AdapterSpec] = field(default_factory=list)
    """Frozen LoRAs added to the base weights at loading (lightx2v, CausVid); exported LoRAs do not contain them."""
    attention: Speed[str] = "auto"
    """Attention backend by its diffusers name (native, flash, ...); auto picks the faster of cuDNN and flash."""
    deterministic: Machine[bool] = False
    """Bit-identical backward passes on a GPU; slower, and not compiled."""
    memory: Speed[Positive | None] = None
    """GPU memory limit per process: GiB, or below 1 a share of the card. None is no limit."""
    compile: Speed[bool | None] = None
    """Compile the transformer blocks; None does so on CUDA in bfloat16 in runs long enough to gain from it."""
    expert: Training[Literal["high", "low", "both"]] = "high"
    """Wan 2.2 with two experts: the one to train; rollouts use both."""
    vae_slicing: Speed[bool] = True
    """Decode clips one at a time; false is faster for small clips."""
    vae_tiling: bool = False
    """Decode in blended spatial tiles, for the largest clips; not exact."""
    options: dict[str, Finite] = field(default_factory=dict)
    """Options of the model family (docs/models.md)."""
    cache: Speed[str | None] = "auto"
    """Folder of cached prompt embeddings; auto is the user's cache folder, None is none."""

    def __post_init__(self) -> None:
        check_prompt(self.negative_prompt, "model.negative_prompt")
        family = self.own_family or ""
        module = family.partition(":")[0].removesuffix(".py").replace("/", ".")
        if module != family:
            raise ModelError(
                f'model.family "{family}": a family is a module, written as in `import`, whose function load(spec, device=None) makes '
                f"the model. Write {module}"
            )
        hint = did_you_mean(family, FAMILIES, 0.4)
        if hint and "." not in family and not is_there(family):
            raise ModelError(
                f'model.family "{family}" is unknown: use one of {", ".join(FAMILIES)}, the import path of a module '
                f"with load(spec), or leave it out to read it from the checkpoint.{hint}"
            )
        if self.revision is not None and self.path in (None, "shapes") and self.family is None:
            raise ModelError(
                f'model.revision "{self.revision}" is a version of a hub id, and model.path names none: give --model.path '
                "owner/name as well, or leave the revision out."
            )
        if self.sigmas != sorted(set(self.sigmas), reverse=True):
            raise ModelError(
                f"model.sigmas must fall strictly from at most 1 to above 0 (the last step ends at 0 by itself), got {self.sigmas}."
            )
        if self.sigmas and self.shift is not None:
            raise ModelError(
                f"model.sigmas is a whole grid, which model.shift {self.shift:g} does not change: leave one out."
            )
        if self.guidance_scale == 1 and self.guidance_scale_2 not in (None, 1):
            raise ModelError(
                f"model.guidance_scale 1 turns guidance off for both experts, as in the stock pipeline, but "
                f"model.guidance_scale_2 is {self.guidance_scale_2:g}. Leave the second out, or raise the first above 1."
            )

    @property
    def own_family(self) -> str | None:
        """The module of a family of the user's own; None for one that ships with the package, and for an object."""
        return None if self.family in FAMILIES or is_object(self.family) else self.family

    @property
    def training_guidance(self) -> float | None:
        """Guidance of the policy that rolls out and learns: None is the model's own scale, 1 is none. Rollout and update share it, so that the first
        ratio is 1 either way."""
        return None if self.guidance_in_training else 1.0

    def budget(self, gib: float) -> float:
        """GiB that a process may use of a card with so many."""
        if self.memory is None:
            return gib
        return min(gib, self.memory * gib if self.memory < 1 else self.memory)

    def check_budget(self, device: str) -> None:
        if self.memory is not None and device == "cpu":
            raise ModelError(
                f"model.memory {self.memory:g} is a budget of a GPU's memory, and a run on a CPU has none: blocks keep everything there. Leave "
                "it out, or use a GPU."
            )

    def family_options(
        self, known: Mapping[str, float | None], whole: Mapping[str, tuple[int, float]]
    ) -> dict[str, float | None]:
        """Options of a family with their defaults; `whole` are those that are whole numbers, with the least and the most."""
        for name in self.options:
            if name not in known:
                hint = did_you_mean(name, known) or f" It has {', '.join(known) or 'none'}."
                raise ModelError(f'model.options: this family has no option "{name}".{hint}')
        for name, (least, most) in whole.items():
            value = self.options.get(name, least)
            if not least <= value <= most or value != int(value):
                end = "" if most == math.inf else f" to {most}"
                raise ModelError(f"model.options {name} is a whole number from {least}{end}, got {value:g}.")
        return {**known, **self.options}

    def check_named(self) -> None:
        refuse_object(self.family, "its model", "Give another model (--model.path, --model.family)")

    def load(self, device: str | torch.device | None = None, *, sharded: bool = False) -> VelocityModel:
        """Load the model; `device` overrides the field (a rank has its own). `sharded` leaves the network in CPU memory, for a caller that shards it
        onto its devices block by block: none of them has to hold all of it."""
        family = self.family
        self.check_named()
        if family is None:
            from sage_grpo.models.checkpoints.checkpoint import detect_family

            family = detect_family(self)
        module = find_family(family)
        import torch

        # Constructors draw weights that the checkpoint then replaces: loading must not move the run's random numbers.
        with torch.random.fork_rng(devices=[]):
            model = module.load(self, device)
        self._check_heard(model)
        model.place("vae", model.device)
        if not sharded:
            model.place("network", model.device)
        return model

    def _check_heard(self, model: VelocityModel) -> None:
        steps = len(self.sigmas)
        heard = not steps or model.sigmas(steps).tolist() == explicit_sigmas(self.sigmas, steps).tolist()
        if not heard or (self.adapters and self.own_family):
            name = "adapters" if heard else "sigmas"
            raise ModelError(f"model.{name}: the family {type(model).__name__} does not know them. Leave them out.")


def explicit_sigmas(levels: Sequence[float], num_steps: int, shift: float | None = None) -> torch.Tensor:
    """The grid of `model.sigmas`; refuses another number of steps or a shift."""
    import torch

    if num_steps != len(levels):
        raise ModelError(
            f"model.sigmas has {len(levels)} noise levels, but {num_steps} steps were asked for: set the steps (rollout.steps, evaluate.steps, "
            f"--steps, --settings.steps) to {len(levels)}."
        )
    if shift is not None:
        raise ModelError(f"model.sigmas is a whole grid, which shift {shift:g} does not change: leave one out.")
    return torch.tensor([*levels, 0.0], dtype=torch.float32)


def find_family(family: str) -> ModuleType:
    try:
        module = import_named(f"sage_grpo.models.families.{family}" if family in FAMILIES else family)
    except NoSuchModule as error:
        shipped = f"Families that ship with the package are {', '.join(FAMILIES)}."
        raise ModelError(f'model.family "{family}": {error} {shipped}') from error
    if not callable(vars(module).get("load")):
        raise ModelError(f'model.family "{family}": it has no function load(spec, device=None) (docs/extending.md).')
    return module
