"""The model part of a configuration. Imports nothing heavy; `load()` does."""

from __future__ import annotations

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

FAMILIES = ("hunyuan15", "wan", "ltx2", "flux", "flux2", "sd3", "qwen_image", "qwen_image_edit", "z_image")
"""Families that ship with the package; each is the module of this name beside this file."""


@checked
class LoraSpec:
    """A low-rank adapter: its modules, rank, scale and start."""

    rank: Count = 32
    """Rank of the update."""
    alpha: Annotated[float, Range(0, MOST_ALPHA, open_below=True)] | None = None
    """Scale: the update is multiplied by alpha / rank. None means alpha = rank."""
    targets: list[str] = field(default_factory=list)
    """Linear modules to adapt: names inside a transformer block ("attn.to_q", "to_q", "ff.*") or full names with
    wildcards ("context_embedder.*.to_q"). Empty means the family's attention and feed-forward layers."""
    seed: Seed = 0
    """Seed of the adapter's first weights; every rank draws the same."""
    path: Values[str | None] = None
    """A saved LoRA of the same shape to start from: a folder, or owner/name@COMMIT on the hub; None starts at zero."""


@checked
class AdapterSpec:
    """A LoRA that is part of the model that training starts from, such as one that makes a checkpoint need few steps."""

    path: str
    """A folder, or owner/name@COMMIT on the hub; safetensors only."""
    file: str = "pytorch_lora_weights.safetensors"
    """The file in it, in diffusers' names or in any that the pipeline's load_lora_weights converts."""
    scale: Finite = 1.0
    """Factor on its update."""
    expert: Literal["high", "low"] | None = None
    """Wan 2.2 with two experts: the one that it belongs to."""

    def __post_init__(self) -> None:
        if not self.path or not self.file.endswith(".safetensors"):
            raise ModelError(
                f'model.adapters: path "{self.path}" and file "{self.file}": name a folder (or owner/name@COMMIT) and a .safetensors file in it.'
            )


@checked
class ModelSpec:
    """A diffusers checkpoint and how to use it."""

    path: Content[str | None] = None
    """A local diffusers folder or a hub id; None (or "shapes") is the small checkpoint that the package carries."""
    revision: Content[str | None] = None
    """Branch, tag or commit of a hub id."""
    family: str | None = None
    """A family that ships with the package ("hunyuan15", "wan", "ltx2", ...), or the import path of a module with a function `load(spec, device=None)`
    ("my_package.toy", or "toy" for toy.py in the current folder); None reads it from the checkpoint."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the network's computation. On a CPU use float32: bfloat16 is hundreds of times slower there."""
    vae_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the VAE's computation; None is `dtype` on CUDA and float32 elsewhere. bfloat16 moves few pixels, by a grey level or two
    (docs/speed.md)."""
    device: Speed[str] = "auto"
    """"auto", "cpu", "cuda" or "cuda:1"."""
    train: Training[bool] = True
    """False loads for inference only: nothing is trainable and weights are kept in `dtype`."""
    lora: Training[LoraSpec | None] = None
    """Train an adapter (float32, on a base in `dtype`); None trains all weights, kept in float32."""
    guidance_scale: Annotated[float, Range(1)] | None = None
    """Guidance; 1 is none; None is what the checkpoint says (HunyuanVideo-1.5: 6). Classifier-free, or an input of the network where
    it was distilled so (FLUX.1-dev)."""
    guidance_scale_2: Annotated[float, Range(1)] | None = None
    """Guidance of the second expert of Wan 2.2; None is `guidance_scale`."""
    negative_prompt: str = ""
    """Prompt of the unconditional branch."""
    guidance_in_training: Training[bool] = True
    """Guide the rollouts and updates of training (the paper does), or only evaluation and generation."""
    negative_gradient: Training[bool] = True
    """Let the gradient of guided training go through the negative prompt's pass as well. False takes that pass for a constant: a backward pass
    and the activations of a branch less (docs/speed.md), another gradient, and the same first ratio."""
    frames: Count | None = None
    """Frames of a clip, 4k + 1 (LTX-2 8k + 1, images 1); None is the checkpoint's or the family's default, as below."""
    height: Count | None = None
    """Height in pixels."""
    width: Count | None = None
    """Width in pixels."""
    fps: Fps | None = None
    """Frames per second."""
    shift: Positive | None = None
    """Shift of the noise schedule; None is the checkpoint's scheduler's."""
    sigmas: list[Annotated[float, Range(0, 1, open_below=True)]] = field(default_factory=list)
    """Noise levels at which steps begin, from high to low, for checkpoints that were distilled to these: [1, 0.9, 0.75, 0.5]. The last step ends at
    0. Rollouts, evaluation and generation all use them, with as many steps. Empty is the grid of the checkpoint's scheduler."""
    adapters: list[AdapterSpec] = field(default_factory=list)
    """Frozen LoRAs that are added to the checkpoint's weights when it is loaded (lightx2v, CausVid). What is trained, compared and called "base"
    then has them; an exported LoRA does not, and its card names them."""
    attention: Speed[str] = "auto"
    """Attention backend by its diffusers name ("native", "_native_cudnn", "flash", ...). "auto" measures cuDNN's and PyTorch's flash
    attention on CUDA in bfloat16, and is PyTorch's own choice elsewhere."""
    deterministic: Machine[bool] = False
    """On a GPU: backward passes add up in a fixed order, so that a run has the same bits when it is made again or continued. Without it
    gradients of attention may differ in the last bit. Slower (docs/speed.md), without cuDNN's attention and not compiled; a model with a
    part that has no such order is refused."""
    memory: Speed[Positive | None] = None
    """GPU memory that a process of the run may use: GiB, or below 1 a share of the card; None is all of it. Blocks keep for their backward
    passes what fits, and the process is held to it: what needs more ends with an error (docs/speed.md)."""
    compile: Speed[bool | None] = None
    """Compile the repeated transformer blocks. None does so on CUDA in bfloat16 when the run is long enough to win the minute back
    that it costs; what was compiled once is found again by later runs."""
    expert: Training[Literal["high", "low", "both"]] = "high"
    """Wan 2.2 with two experts: train the one for high noise, the one for low noise, or both, each with the gradient of its own noise levels;
    rollouts use both."""
    vae_slicing: Speed[bool] = True
    """Decode one clip at a time; False decodes a batch at once (faster for small clips), also where rewards are differentiated."""
    vae_tiling: bool = False
    """Decode in spatial tiles and blend their seams. Without it clips are decoded in chunks of frames, exactly; try it where even one
    chunk is too much memory."""
    options: dict[str, Finite] = field(default_factory=dict)
    """Options of the family's own by name, such as stg_scale of LTX-2 (docs/models.md)."""
    cache: Speed[str | None] = "auto"
    """Folder of encoded prompts, so that later runs need no text encoder. "auto" is the user's cache folder; None writes none."""

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

    def family_options(self, known: Mapping[str, float | None]) -> dict[str, float | None]:
        for name in self.options:
            if name not in known:
                hint = did_you_mean(name, known) or f" It has {', '.join(known) or 'none'}."
                raise ModelError(f'model.options: this family has no option "{name}".{hint}')
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
