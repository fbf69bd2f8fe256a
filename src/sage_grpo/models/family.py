"""The base class of all diffusers families. A family adds its constants (`Traits`), grid, encoding and forward pass; see docs/extending.md."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from sage_grpo.models import ModelError, lora
from sage_grpo.models.base import Abilities, Part, Progress
from sage_grpo.models.checkpoints import checkpoint, export
from sage_grpo.models.checkpoints.cache import condition, open_cache
from sage_grpo.models.codec import Codec
from sage_grpo.models.devices import DTYPES, Home, autocast, choose_device, load_dtypes, master_weights
from sage_grpo.models.experts import Experts, prepare_training, trained_components
from sage_grpo.models.guidance import Guidance, check_guidance, read_guidance, run_both, warn_if_distilled
from sage_grpo.models.network.attention import Shape, checked_backend, choose_backend, set_backend
from sage_grpo.models.network.blocks import compile_blocks, keep_activations
from sage_grpo.models.network.inputs import LatentGrid, choose_video, empty, first_given, in_equal_batches
from sage_grpo.models.schedulers import SchedulerSolver, check_scheduler, own_sigmas, prepared, scheduler_shift
from sage_grpo.models.spec import ModelSpec, explicit_sigmas
from sage_grpo.models.traits import Traits
from sage_grpo.samplers.solvers import Solver
from sage_grpo.types import Conditioning, Keep


class FamilyModel(ABC):
    """A VelocityModel around the components of a stock diffusers pipeline. Subclasses implement `_grid`, `_encode` and `_forward`, and replace the
    hooks that differ. What a pipeline does with its VAE is an object of its own, which `traits` names: `codec`."""

    traits: Traits

    @classmethod
    def load(cls, spec: ModelSpec, device: str | torch.device | None = None) -> Self:
        """Load the checkpoint of a spec; bad settings and files are refused before weights are read, where possible."""
        import diffusers

        folder, traits = checkpoint.resolve(spec), cls.traits
        index = checkpoint.read_index(folder)
        name = index["_class_name"]
        if name not in traits.pipelines:
            raise ModelError(
                f'"{folder}" holds a {name}, but this family serves {", ".join(traits.pipelines)}. Leave model.family out to '
                "read it from the checkpoint."
            )
        checkpoint.check_components(
            folder, index, ["transformer", "vae", "scheduler", *traits.components], ["transformer", "vae"]
        )
        check_scheduler(folder, index, even=traits.even_sigmas, dynamic=traits.dynamic_shift)
        check_guidance(spec, folder, index)
        spec.family_options(traits.options, traits.whole)
        cls._check(folder, index)
        experts = index.get("boundary_ratio") is not None
        adapters = [lora.find_adapter(adapter, experts=experts) for adapter in spec.adapters]
        encoders = [encoder for encoder in traits.encoders if checkpoint.has_component(index, encoder)]
        dtypes = load_dtypes(spec, device, trained=trained_components(spec, index))
        dtypes |= dict.fromkeys(traits.decoders, dtypes["vae"])
        skip = [*encoders, *traits.read_here]
        pipe = checkpoint.load_pipeline(getattr(diffusers, cls._pipeline(index)), folder, skip=skip, dtypes=dtypes)
        for adapter, place in zip(spec.adapters, adapters):
            lora.fuse_adapter(pipe, adapter, place)
        return cls(spec, folder, index, pipe, device=device)

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        index: Mapping[str, Any],
        pipe: Any,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        self.spec, self.folder, self.index, self.pipe = spec, folder, dict(index), pipe
        self.options = spec.family_options(self.traits.options, self.traits.whole)
        self.text_tokens = self.traits.text_tokens  # tokens of a prompt, for estimates of cost
        self.choices: dict[str, str] = {}
        """Decisions while loading with their reasons, and the result of merging a LoRA, as text for the user."""
        self.stock_pipeline = str(index["_class_name"])
        """Name of the pipeline that samples as this model does, for messages."""
        self.pictures = {1} if "ImageToVideo" in self.stock_pipeline else {0}
        """Allowed numbers of pictures of a sample: 0 none, 1 the first frame, 2 the first and the last."""
        self.unused: tuple[str, ...] = ()  # the same as `Traits.unread`, of this checkpoint or this format of clips
        self.reading = ""
        """Further dependencies of an encoding besides files, class, precision and text: FLUX.1's number of tokens. Part of the cache's key."""
        self.experts = Experts(spec, index, pipe)
        first = self.experts.components[0]
        self.transformer: Any = getattr(pipe, first)
        self.others = [getattr(pipe, name) for name in self.experts.all if name != first]
        self._prepare()
        self.network: Any = self._adapted(self.transformer)
        for other in self.others:
            self._adapted(other)
        self.device = choose_device(spec.device if device is None else device)
        self.dtype = DTYPES[spec.dtype]
        defaults = checkpoint.read_defaults(folder)
        self.video = choose_video(spec, defaults, self.traits.video)
        self.grid = self._grid()
        self.grid.check(self.video)
        self.given_shift = spec.shift if spec.shift is not None else defaults.get("shift")
        """None leaves the shift to the scheduler."""
        stock_shift = scheduler_shift(pipe.scheduler.config, self.tokens)
        self.shift = float(first_given(self.given_shift, stock_shift, 1.0))
        self.guidance = self._guidance_style()
        self.guidance_scale = float(first_given(spec.guidance_scale, self.guidance.scale, self.traits.guidance_scale))
        self.conditions: WeakValueDictionary[tuple[str, str], Conditioning] = WeakValueDictionary()
        self.cache, self._home = open_cache(self), Home()
        self.places: dict[str, torch.device] = dict.fromkeys(("network", "text", "vae"), self.device)
        self.lora_targets = (spec.lora.targets if spec.lora is not None else []) or list(self.traits.lora_targets)
        """Modules that a LoRA adapts: the spec's, or the family's."""
        self.attention = ""  # the kernel that was chosen
        self.unread = prepare_training(self)  # parameters of `transformer` that nothing reads
        if spec.vae_tiling:
            pipe.vae.enable_tiling()
        self._set_attention()
        warn_if_distilled(spec, self.guidance, self.guidance_scale)
        if spec.compile:
            ragged, both = self.traits.ragged, len(self.experts.components) > 1
            compile_blocks(self.network, self.blocks(), train=spec.train, ragged=ragged)
            for other in self.others:
                compile_blocks(other, self.traits.blocks_of(other), train=spec.train and both, ragged=ragged)

    def _set_attention(self) -> None:
        shape, fixed = Shape(self.tokens, *self.heads), self.spec.deterministic
        asked = checked_backend(self.spec.attention, self.network)
        backend, why = choose_backend(asked, self.device, self.dtype, shape, deterministic=fixed)
        self.choices["attention"], self.attention = why, backend.value
        for module in (self.network, *self.others):
            set_backend(module, backend)

    # ---- hooks for a family

    @abstractmethod
    def _grid(self) -> LatentGrid:
        """The division of a clip by the VAE and the network."""

    @abstractmethod
    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        """The network's inputs for one sample besides x and sigma, without batch dimension and padding."""

    @abstractmethod
    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """The velocity of a batch whose inputs have equal shapes; `timestep` (one per sample) is the network's time input. It is float32 here, and
        rounded only where the stock pipeline rounds it: bfloat16 makes 956 of 954.5."""

    @classmethod  # noqa: B027 - most families refuse nothing more
    def _check(cls, folder: Path, index: Mapping[str, Any]) -> None:
        """Refuse checkpoints that this family cannot run, beyond the common checks."""

    @classmethod
    def _pipeline(cls, index: Mapping[str, Any]) -> str:
        """The pipeline class that runs a checkpoint: its own, or another that can do more with the same weights."""
        return str(index["_class_name"])

    def _prepare(self) -> None:  # noqa: B027 - most families decide nothing more
        """Set the family's attributes from the spec and the pipeline, before anything else is made."""

    def _adapted(self, transformer: Any) -> nn.Module:
        """The network that runs a stock transformer: itself, with another attention perhaps, or a module around it."""
        return transformer

    def batchable(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Inputs as they are batched; Wan pads here, because its padding is part of the model."""
        return inputs

    def _guidance_style(self) -> Guidance:
        if self.traits.embeds_guidance:
            return Guidance(embedded=True) if self.transformer.config.guidance_embeds else Guidance(scale=1.0)
        return read_guidance(self.folder, self.index)

    def _trial_inputs(self, text: int = 2) -> dict[str, Tensor]:
        """Inputs of one sample on the meta device, as `_encode` gives them, with so many tokens of text."""
        config, widths = self.transformer.config, self.traits.inputs
        inputs = {name: empty(*([text] if name == "text" else []), config[width]) for name, width in widths.items()}
        return inputs | ({"guidance": empty(())} if self.guidance.embedded else {})

    # ---- parts and sizes

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            choices=self.choices,
            network_at=self.experts.at,
            branches=self.branches,
            solver=self.solver,
            pixels=self.codec.pixels,
            encoder=self.codec,
        )

    @property
    def codec(self) -> Codec:
        return self.traits.codec(self)

    def latent_shape(self) -> tuple[int, ...]:
        return self.grid.latents(self.video)

    @property
    def heads(self) -> tuple[int, int]:
        config = self.transformer.config
        return config.num_attention_heads, config.attention_head_dim

    @property
    def tokens(self) -> int:
        return self.grid.tokens(self.video)

    @property
    def given_tokens(self) -> int:
        """Tokens beside a clip's own that blocks run like them: of a picture that is edited."""
        return 0

    # ---- conditioning

    def encode(self, prompts: Sequence[str], images: Sequence[Tensor | None] | None = None) -> list[Conditioning]:
        pictures = [None] * len(prompts) if images is None else list(images)
        if len(pictures) != len(prompts):
            raise ModelError(f"{len(prompts)} prompts but {len(pictures)} images: give one image per prompt.")
        return [condition(self, prompt, picture) for prompt, picture in zip(prompts, pictures)]

    def encoder(self, name: str) -> Any:
        """An encoder, loaded when first needed and after unload_text."""
        if getattr(self.pipe, name, None) is None:
            module = checkpoint.load_component(self.folder, self.index, name, self.dtype)
            self.pipe.register_modules(**{name: module.to(self.places["text"])})
        return getattr(self.pipe, name)

    def unload_text(self) -> None:
        for name in self.traits.encoders:
            if getattr(self.pipe, name, None) is not None:
                self.pipe.register_modules(**{name: None})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- sampling

    def sigmas(self, num_steps: int, shift: float | None = None) -> Tensor:
        if self.spec.sigmas:
            return explicit_sigmas(self.spec.sigmas, num_steps, shift)
        shift = self.shift_of(num_steps) if shift is None else shift
        return own_sigmas(self.pipe.scheduler, num_steps, shift, even=self.traits.even_sigmas)

    def shift_of(self, num_steps: int) -> float:
        """The default shift of a schedule of so many steps; that of FLUX.2's pipelines depends on their number."""
        return self.shift

    def solver(self, num_steps: int, shift: float | None = None) -> Solver:
        if self.spec.sigmas:
            raise ModelError(
                'solver "checkpoint" has its own grid, and model.sigmas states another: use solver "euler".'
            )
        shift = self.shift_of(num_steps) if shift is None else shift
        return SchedulerSolver(prepared(self.pipe.scheduler, num_steps, shift, even=self.traits.even_sigmas))

    def velocity(
        self,
        x: Tensor,
        sigma: Tensor,
        conditions: Sequence[Conditioning],
        *,
        guidance: float | None = None,
        timestep: Tensor | None = None,
    ) -> Tensor:
        """dx/dsigma, guided; see VelocityModel. `timestep` replaces the network's time input, its scale times sigma."""
        self.check_latents(x)
        if len(conditions) != len(x):
            raise ModelError(f"{len(x)} samples but {len(conditions)} conditions: give one per sample.")
        scale = self._scale(sigma, guidance)
        time = self.experts.timestep(sigma) if timestep is None else timestep.to(torch.float32)
        inputs = [one.tensors for one in conditions]
        if self.guidance.embedded:
            given_scale = torch.tensor(float(scale))
            inputs = [{**tensors, "guidance": given_scale} for tensors in inputs]
        run = partial(self._branch, sigma, time)
        if self.branches(sigma, guidance) == 1:
            return run(x, inputs)
        negatives = [one.negative for one in conditions if one.negative is not None]
        if len(negatives) != len(conditions):
            raise ModelError(
                f"guidance {scale:g} needs encoded negative prompts, but the model was loaded with guidance_scale 1. Set model.guidance_scale."
            )
        v, v_negative = run_both(run, x, inputs, negatives, self.tokens, gradient=self.spec.negative_gradient)
        return self._combine(x, sigma, v, v_negative, scale, partial(run, x, inputs))

    def _combine(
        self, x: Tensor, sigma: Tensor, v: Tensor, v_negative: Tensor, scale: float, again: Callable[[], Tensor]
    ) -> Tensor:
        """The guided velocity; `again` runs the pass with the prompt once more, as LTX-2 does with parts switched off."""
        return self.guidance.combine(v, v_negative, scale)

    def _branch(self, sigma: Tensor, time: Tensor, x: Tensor, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
        def run(x: Tensor, batch: dict[str, Tensor]) -> Tensor:
            with autocast(self.spec, self.device, self.dtype):
                return self._forward(x, sigma, time.to(self.device).expand(len(x)), batch).to(torch.float32)

        one_each = {id(tensors): tensors for tensors in inputs}
        ready = {key: self.batchable(tensors) for key, tensors in one_each.items()}
        return in_equal_batches(run, x.to(torch.float32), [ready[id(tensors)] for tensors in inputs], x.device)

    def _scale(self, sigma: Tensor | float, guidance: float | None) -> float:
        second = self.spec.guidance_scale_2
        default = self.guidance_scale if second is None or self.experts.at(sigma) == 0 else second
        return default if guidance is None else guidance

    def branches(self, sigma: Tensor | float, guidance: float | None = None) -> int:
        """Forward passes of one velocity: two where guidance runs the negative prompt as well; `guidance` overrides the model's scale."""
        return 1 if self.guidance.embedded or self._scale(sigma, guidance) == 1 else 2

    def trains(self, sigma: Tensor | float) -> bool:
        return self.experts.all[self.experts.at(sigma)] in self.experts.components

    @property
    def _input_dtype(self) -> torch.dtype:
        return torch.float32 if master_weights(self.spec) else self.dtype

    def decode(self, latents: Tensor, progress: Progress | None = None) -> Tensor:
        return self.codec.decode(latents, progress)

    # ---- training and files

    def blocks(self) -> list[nn.Module]:
        return self.traits.blocks_of(self.transformer)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes, by their names in the diffusers transformer; with both experts trained, after the component's name and a dot."""
        return {name: parameter for name, parameter in self.experts.parameters().items() if parameter.requires_grad}

    def keep(self, levels: Sequence[Keep]) -> None:
        for transformer in self.experts.trained.values():
            keep_activations(self.traits.blocks_of(transformer), levels)

    def place(self, part: Part, device: str | torch.device) -> None:
        self.places[part] = torch.device(device)
        move = self._home.move if part == "vae" else nn.Module.to
        for module in self.modules(part):
            move(module, self.places[part])

    def modules(self, part: str) -> list[nn.Module]:
        if part == "network":
            return [self.network, *self.others]
        names = self.traits.decoders if part == "vae" else self.traits.encoders
        return [module for name in names if (module := getattr(self.pipe, name, None)) is not None]

    def load_lora(self, folder: str | Path) -> None:
        self.experts.load(folder)
        self.place("network", self.places["network"])
        self._set_attention()

    def save(self, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None, merged: bool = False) -> None:
        """Write a LoRA, or a whole diffusers folder if all weights are trained or `merged`. `weights` replaces parameters by name (an average)."""
        folder, whole = Path(folder), merged or self.spec.lora is None
        states, merge = self.experts.save(folder, weights or {}, whole=whole)
        if whole:
            export.save_folder(self.folder, folder, states, self.dtype)
        if merge.update:
            self.choices["merged"] = export.describe_merge(merge, self.spec.dtype)
        export.write_card(folder, self, whole=whole)

    def check_latents(self, latents: Tensor, *, part: bool = False) -> None:
        expected = self.latent_shape()
        if part and len(expected) > 1 and latents.ndim == len(expected) + 1:
            expected = (expected[0], min(expected[1], latents.shape[2]), *expected[2:])
        if tuple(latents.shape[1:]) != expected:
            raise ModelError(
                f"Latents have shape {tuple(latents.shape)}, but {self.video.frames} frames of {self.video.height} x "
                f"{self.video.width} need (batch, {', '.join(map(str, expected))}). Build them from latent_shape()."
            )
