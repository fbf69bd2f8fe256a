"""The base class of all diffusers families. A family adds its encoding, forward pass and scaling; see docs/extending.md."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from sage_grpo.models import ModelError, lora, no_numbers
from sage_grpo.models.base import Part, Progress
from sage_grpo.models.checkpoints import export
from sage_grpo.models.checkpoints.cache import EncodingCache, default_folder, digest, image_digest
from sage_grpo.models.checkpoints.checkpoint import (
    check_components,
    fingerprint,
    has_component,
    load_component,
    load_pipeline,
    read_defaults,
    read_index,
    resolve,
)
from sage_grpo.models.devices import DTYPES, Home, choose_device, load_dtypes
from sage_grpo.models.experts import Experts, load_trained, save_trained, trained_components
from sage_grpo.models.guidance import Guidance, check_guidance, read_guidance, runs_together, warn_if_distilled
from sage_grpo.models.network.attention import Shape, checked_backend, choose_backend, set_backend
from sage_grpo.models.network.blocks import compile_blocks, keep_activations
from sage_grpo.models.network.decoding import to_floats, to_uint8
from sage_grpo.models.network.gradients import empty, one_after_another, unread_queries, without_gradient
from sage_grpo.models.network.inputs import LatentGrid, check_image, choose_video, first_given, in_equal_batches
from sage_grpo.models.schedulers import (
    SchedulerSolver,
    check_scheduler,
    own_sigmas,
    prepared,
    scheduler_shift,
    steps_from_noise,
)
from sage_grpo.models.spec import ModelSpec, explicit_sigmas
from sage_grpo.models.traits import Traits
from sage_grpo.samplers.solvers import Solver
from sage_grpo.types import Conditioning, Keep, Placed, VideoSpec


class FamilyModel(ABC):
    """A VelocityModel around the components of a stock diffusers pipeline.

    Subclasses implement the four abstract methods. They may also replace the methods below them that already do something.
    """

    traits: Traits

    @classmethod
    def load(cls, spec: ModelSpec, device: str | torch.device | None = None) -> Self:
        """Load the checkpoint of a spec; bad settings and files are refused before weights are read, where possible."""
        import diffusers

        folder, traits = resolve(spec), cls.traits
        index = read_index(folder)
        name = index["_class_name"]
        if name not in traits.pipelines:
            raise ModelError(
                f'"{folder}" holds a {name}, but this family serves {", ".join(traits.pipelines)}. Leave model.family out to '
                "read it from the checkpoint."
            )
        check_components(folder, index, ["transformer", "vae", "scheduler", *traits.components], ["transformer", "vae"])
        check_scheduler(folder, index, even=traits.even_sigmas, dynamic=traits.dynamic_shift)
        check_guidance(spec, folder, index)
        for option, (least, most) in traits.whole.items():
            value = spec.options.get(option, least)
            if not least <= value <= most or value != int(value):
                end = "" if most == math.inf else f" to {most}"
                raise ModelError(f"model.options {option} is a whole number from {least}{end}, got {value:g}.")
        cls._check(folder, index)
        experts = index.get("boundary_ratio") is not None
        adapters = [lora.find_adapter(adapter, experts=experts) for adapter in spec.adapters]
        encoders = [encoder for encoder in traits.encoders if has_component(index, encoder)]
        dtypes = load_dtypes(spec, device, trained=trained_components(spec, index))
        dtypes |= dict.fromkeys(traits.decoders, dtypes["vae"])
        skip = [*encoders, *traits.read_here]
        pipe = load_pipeline(getattr(diffusers, cls._pipeline(index)), folder, skip=skip, dtypes=dtypes)
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
        self.options = spec.family_options(self.traits.options)
        self.text_tokens = self.traits.text_tokens
        """Tokens of a prompt, for estimates of cost."""
        self.choices: dict[str, str] = {}
        """Decisions while loading with their reasons, and the result of merging a LoRA, as text for the user."""
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
        defaults = read_defaults(folder)
        self.video = choose_video(spec, defaults, self.traits.video)
        self.grid = self._grid()
        self.grid.check(self.video)
        self._given_shift = spec.shift if spec.shift is not None else defaults.get("shift")
        """None leaves the shift to the scheduler."""
        stock_shift = scheduler_shift(pipe.scheduler.config, self.tokens)
        self.shift = float(first_given(self._given_shift, stock_shift, 1.0))
        self.num_train_timesteps = float(pipe.scheduler.config.num_train_timesteps)
        """The network's timestep is sigma times this."""
        self.guidance = self._guidance_style()
        self.guidance_scale = float(first_given(spec.guidance_scale, self.guidance.scale, self.traits.guidance_scale))
        self._conditions: WeakValueDictionary[tuple[str, str], Conditioning] = WeakValueDictionary()
        self._sources: WeakValueDictionary[tuple[str, ...], Tensor] = WeakValueDictionary()
        self._cache, self._home = self._open_cache(), Home()
        self._places: dict[str, torch.device] = dict.fromkeys(("network", "text", "vae"), self.device)
        self._prepare_training()
        if spec.vae_tiling:
            pipe.vae.enable_tiling()
        self._set_attention()
        warn_if_distilled(spec, folder, self.guidance, self.guidance_scale)
        if spec.compile:
            compile_blocks(self.network, self.blocks(), train=spec.train, ragged=self.traits.ragged)
            both = len(self.experts.components) > 1
            for other in self.others:
                compile_blocks(other, self._blocks_of(other), train=spec.train and both, ragged=self.traits.ragged)

    def _set_attention(self) -> None:
        shape = Shape(self.tokens, *self.heads)
        asked, fixed = checked_backend(self.spec.attention, self.network), self.spec.deterministic
        backend, self.choices["attention"] = choose_backend(asked, self.device, self.dtype, shape, deterministic=fixed)
        self.attention = backend.value
        """The kernel that was chosen."""
        for module in (self.network, *self.others):
            set_backend(module, backend)

    # ---- hooks for a family

    @abstractmethod
    def _grid(self) -> LatentGrid:
        """The division of a clip by the VAE and the network."""

    @abstractmethod
    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        """The network's inputs for one sample besides x and sigma, without batch dimension and padding."""

    def _placed(self, given: Sequence[Placed]) -> dict[str, Tensor]:
        """The inputs for given frames, where the family has `encode_placed`."""
        raise NotImplementedError

    @abstractmethod
    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """The velocity of a batch whose inputs have equal shapes; `timestep` (one per sample) is the network's time input."""

    @abstractmethod
    def _to_vae(self, latents: Tensor) -> Tensor:
        """Latents as the VAE's decoder expects them: its own scaling, exactly once."""

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

    def _instruct(self, prompt: str) -> str:
        """The text that is encoded for a prompt; SANA puts an instruction before it. A negative prompt is encoded as it is."""
        return prompt

    def _reading(self) -> str:
        """Further dependencies of an encoding besides files, class, precision and text: FLUX.1's number of tokens. Part of the cache's key."""
        return ""

    def _batchable(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Inputs as they are batched; Wan pads here, because its padding is part of the model."""
        return inputs

    def _shift_of(self, num_steps: int) -> float:
        """The default shift of a schedule of so many steps; that of FLUX.2's pipelines depends on their number."""
        return self.shift

    def _guidance_style(self) -> Guidance:
        """The kind of guidance; by default that of the checkpoint's guider."""
        if self.traits.embeds_guidance:
            return Guidance(embedded=True) if self.transformer.config.guidance_embeds else Guidance(scale=1.0)
        return read_guidance(self.folder, self.index)

    def _pixels(self, z: Tensor) -> Iterable[Tensor]:
        """Decoded pixels B x 3 x frames x H x W, in chunks of frames where the decoder can work in chunks; here all at once."""
        return [self.pipe.vae.decode(z, return_dict=False)[0]]

    def _from_pixels(self, pixels: Tensor) -> Tensor:
        """The VAE's encoding of pixels B x 3 x frames x H x W in [-1, 1]: the mode of its distribution, before any scaling."""
        return self.pipe.vae.encode(pixels).latent_dist.mode()

    # ---- sizes

    def _grid_of_clips(self, channels: int, sides: int = 1) -> LatentGrid:
        """The grid of most video pipelines: the pipeline has the division by the VAE, the transformer the size of a token."""
        pipe, config, side = self.pipe, self.transformer.config, self.transformer.config.patch_size
        temporal, spatial = pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial
        patch = (config.patch_size_t, side, side) if isinstance(side, int) else tuple(side)
        return LatentGrid(channels=channels, temporal=temporal, spatial=spatial, patch=patch, sides=sides)

    def latent_shape(self) -> tuple[int, ...]:
        """Channels, frames, height, width of one sample's latents."""
        return self.grid.latents(self.video)

    def in_format(self, video: VideoSpec) -> Self:
        """The same model and weights for clips of another format; schedule, attention and guidance stay as they were chosen for its own."""
        self.grid.check(video)
        other = copy(self)
        other.video = video
        return other

    @property
    def heads(self) -> tuple[int, int]:
        """Attention heads of the network, and the width of one."""
        config = self.transformer.config
        return config.num_attention_heads, config.attention_head_dim

    @property
    def tokens(self) -> int:
        """Video tokens of a clip."""
        return self.grid.tokens(self.video)

    @property
    def given_tokens(self) -> int:
        """Tokens beside a clip's own that blocks run like them: of a picture that is edited."""
        return 0

    # ---- conditioning

    def encode(self, prompts: Sequence[str], images: Sequence[Tensor | None] | None = None) -> list[Conditioning]:
        """One conditioning per prompt; equal prompts with equal images share one object."""
        pictures = [None] * len(prompts) if images is None else list(images)
        if len(pictures) != len(prompts):
            raise ModelError(f"{len(prompts)} prompts but {len(pictures)} images: give one image per prompt.")
        return [self._condition(prompt, picture) for prompt, picture in zip(prompts, pictures)]

    def _condition(self, prompt: str, image: Tensor | tuple[Placed, ...] | None) -> Conditioning:
        if not isinstance(image, tuple):
            check_image(image, needed=self.image_to_video, taken=self.takes_images, pictures=self.pictures)
        key, negative = image_digest(image), None
        guided = self.guidance_scale != 1 or (self.spec.guidance_scale_2 or 1) != 1
        if guided and not self.guidance.embedded:
            negative = self._branch_inputs(self.spec.negative_prompt, image, key)
        tensors = self._branch_inputs(self._instruct(prompt), image, key)
        return self._conditions.setdefault((prompt, key), Conditioning(tensors, negative))

    def _branch_inputs(
        self, prompt: str, image: Tensor | tuple[Placed, ...] | None, image_key: str
    ) -> dict[str, Tensor]:
        def encode() -> dict[str, Tensor]:
            with torch.no_grad():
                placed = self._placed(image) if isinstance(image, tuple) else {}
                made = placed | self._encode(prompt, None if isinstance(image, tuple) else image)
            if not all(bool(tensor.isfinite().all()) for tensor in made.values()):
                raise no_numbers("What is encoded of a prompt", [*self._modules("text"), *self._modules("vae")])
            return made

        inputs = self._cache.get((prompt, image_key), encode)
        for name, tensor in self._batchable(inputs).items():
            if not tensor.numel():
                raise ModelError(
                    f'Nothing of the prompt {prompt!r} reaches the network (its input "{name}" has shape {tuple(tensor.shape)}): the '
                    "checkpoint's tokenizer makes no token of it and adds none of its own. Give a prompt that is not empty (for the "
                    "negative one model.negative_prompt), or a tokenizer that marks where a text begins or ends."
                )
        return inputs

    @property
    def image_to_video(self) -> bool:
        """True if every sample needs an image."""
        return "ImageToVideo" in self.index["_class_name"]

    @property
    def takes_images(self) -> bool:
        """True if a sample may have an image."""
        return self.image_to_video

    @property
    def pictures(self) -> tuple[int, ...]:
        """Allowed numbers of pictures of an image: 1 the first frame, 2 the first and the last."""
        return (1,)

    def _open_cache(self) -> EncodingCache:
        if self.spec.cache is None:
            return EncodingCache(None, "")
        folder = default_folder() if self.spec.cache == "auto" else Path(self.spec.cache).expanduser()
        # Encoding depends on the configs of the sampling networks but not on their weights; it may read every other component.
        networks = self.experts.all
        files = ["model_index.json", *(f"{name}/config.json" for name in networks)]
        files += [
            name for name in self.index if has_component(self.index, name) and name not in (*networks, "scheduler")
        ]
        # A picture is encoded at the clip's size.
        size = f"{self.video}/{self.pipe.vae.dtype}/{self.spec.vae_tiling}" if self.takes_images else ""
        code = f"{type(self).__module__}.{type(self).__name__}/{self.spec.dtype}"
        return EncodingCache(folder, digest(fingerprint(self.folder, files), code, size, self._reading()))

    def _encoder(self, name: str) -> Any:
        """An encoder, loaded when first needed and after unload_text."""
        if getattr(self.pipe, name, None) is None:
            module = load_component(self.folder, self.index, name, self.dtype)
            self.pipe.register_modules(**{name: module.to(self._places["text"])})
        return getattr(self.pipe, name)

    def unload_text(self) -> None:
        """Drop the encoders; a prompt that is not cached loads them again."""
        for name in self.traits.encoders:
            if getattr(self.pipe, name, None) is not None:
                self.pipe.register_modules(**{name: None})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- sampling

    def sigmas(self, num_steps: int, shift: float | None = None) -> Tensor:
        """The grid that the spec states, or the stock pipeline's."""
        if self.spec.sigmas:
            return explicit_sigmas(self.spec.sigmas, num_steps, shift)
        steps = steps_from_noise(num_steps, self.strength)
        return self.stock_sigmas(steps, shift)[steps - num_steps :]

    def stock_sigmas(self, num_steps: int, shift: float | None = None) -> Tensor:
        """The grid of the stock pipeline from pure noise."""
        shift = self._shift_of(num_steps) if shift is None else shift
        return own_sigmas(self.pipe.scheduler, num_steps, shift, even=self.traits.even_sigmas)

    def solver(self, num_steps: int, shift: float | None = None) -> Solver:
        """The checkpoint's scheduler, fresh for one sampling."""
        if self.spec.sigmas:
            raise ModelError(
                'solver "checkpoint" has a grid of its own, and model.sigmas states another: use solver "euler".'
            )
        steps = steps_from_noise(num_steps, self.strength)
        scheduler = self._scheduler(steps, self._shift_of(steps) if shift is None else shift)
        return SchedulerSolver(scheduler, steps - num_steps)

    def _scheduler(self, num_steps: int, shift: float) -> Any:
        """A scheduler on the grid of the stock pipeline."""
        return prepared(self.pipe.scheduler, num_steps, shift, even=self.traits.even_sigmas)

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
        return self.both(x, sigma, conditions, guidance=guidance, timestep=timestep)[0]

    def both(
        self,
        x: Tensor,
        sigma: Tensor,
        conditions: Sequence[Conditioning],
        *,
        guidance: float | None = None,
        timestep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`velocity`, and the velocity of the prompt alone."""
        self._check_latents(x)
        if len(conditions) != len(x):
            raise ModelError(f"{len(x)} samples but {len(conditions)} conditions: give one per sample.")
        scale = self._scale(sigma, guidance)
        network_time = self._timestep(sigma) if timestep is None else timestep.to(torch.float32)
        inputs = [condition.tensors for condition in conditions]
        if self.guidance.embedded:
            told_scale = torch.tensor(float(scale))
            inputs = [{**tensors, "guidance": told_scale} for tensors in inputs]
        if self.branches(sigma, guidance) == 1:
            v = self._branch(x, sigma, network_time, inputs)
            return v, v
        return self._guided(x, sigma, network_time, inputs, conditions, scale)

    def _guided(
        self,
        x: Tensor,
        sigma: Tensor,
        network_time: Tensor,
        inputs: Sequence[Mapping[str, Tensor]],
        conditions: Sequence[Conditioning],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """The guided velocity, and that of the prompt alone; `inputs` are those of the prompts."""
        v, v_negative = self._prompt_and_negative(x, sigma, network_time, inputs, conditions, scale)
        return self.guidance.combine(v, v_negative, scale), v

    def _prompt_and_negative(
        self,
        x: Tensor,
        sigma: Tensor,
        network_time: Tensor,
        inputs: Sequence[Mapping[str, Tensor]],
        conditions: Sequence[Conditioning],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of both branches of guidance; `inputs` are those of the prompts."""
        negatives = [condition.negative for condition in conditions if condition.negative is not None]
        if len(negatives) != len(conditions):
            raise ModelError(
                f"guidance {scale:g} needs encoded negative prompts, but the model was loaded with guidance_scale 1. "
                "Set model.guidance_scale."
            )
        if runs_together(self.device, 2 * len(x) * self.tokens):
            v, v_negative = self._branch(torch.cat([x, x]), sigma, network_time, [*inputs, *negatives]).chunk(2)
            v_negative = v_negative if self.spec.negative_gradient else v_negative.detach()
        elif self.spec.negative_gradient:
            v, v_negative = one_after_another(
                self._branch(x, sigma, network_time, inputs),
                self._branch(x, sigma, network_time, negatives),
            )
        else:
            with torch.no_grad():  # first, before the other branch keeps activations
                v_negative = self._branch(x, sigma, network_time, negatives)
            v = self._branch(x, sigma, network_time, inputs)
        return v, v_negative

    def _branch(
        self,
        x: Tensor,
        sigma: Tensor,
        network_time: Tensor,
        inputs: Sequence[Mapping[str, Tensor]],
    ) -> Tensor:
        def run(x: Tensor, batch: dict[str, Tensor]) -> Tensor:
            with self._autocast():
                return self._forward(x, sigma, network_time.to(self.device).expand(len(x)), batch).to(torch.float32)

        ready = {
            id(tensors): self._batchable(tensors) for tensors in {id(tensors): tensors for tensors in inputs}.values()
        }
        return in_equal_batches(run, x.to(torch.float32), [ready[id(tensors)] for tensors in inputs], x.device)

    def _timestep(self, sigma: Tensor | float) -> Tensor:
        """The network's timestep in float32; `_forward` rounds it only where the stock pipeline does (FLUX.1, Qwen-Image).

        bfloat16 makes 956 of 954.5: there must be one place that rounds, or rollout and replay see two models.
        """
        return torch.as_tensor(sigma, dtype=torch.float32) * self.num_train_timesteps

    def _scale(self, sigma: Tensor | float, guidance: float | None) -> float:
        second = self.spec.guidance_scale_2
        default = self.guidance_scale if second is None or self.network_at(sigma) == 0 else second
        return default if guidance is None else guidance

    def branches(self, sigma: Tensor | float, guidance: float | None = None) -> int:
        """Forward passes of one velocity: two where guidance runs the negative prompt as well; `guidance` overrides the model's scale."""
        return 1 if self.guidance.embedded or self._scale(sigma, guidance) == 1 else 2

    def trains(self, sigma: Tensor | float) -> bool:
        """True if a trained network predicts the velocity at sigma (Wan 2.2 has another expert for the rest)."""
        return self._component_at(sigma) in self.experts.components

    def network_at(self, sigma: Tensor | float) -> int:
        """Index of the expert that predicts the velocity at sigma: 0 the one for high noise, or the only network."""
        return self.experts.at(float(self._timestep(sigma)))

    def _component_at(self, sigma: Tensor | float) -> str:
        return self.experts.all[self.network_at(sigma)]

    def _running(self, sigma: Tensor | float) -> Any:
        """The network that predicts the velocity at sigma."""
        return self.network if self._component_at(sigma) == self.experts.components[0] else self.others[0]

    def _autocast(self) -> AbstractContextManager[Any]:
        """bfloat16 compute on float32 master weights; a LoRA's base is in bfloat16 itself and needs none.

        Without its cache, which would keep a bfloat16 copy of the whole network until the end of a pass that reads every weight
        once.
        """
        mixed = self._master_weights and self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=mixed, cache_enabled=False)

    @property
    def _master_weights(self) -> bool:
        return self.spec.train and self.spec.lora is None

    @property
    def _input_dtype(self) -> torch.dtype:
        return torch.float32 if self._master_weights else self.dtype

    # ---- latents to video

    def decode(self, latents: Tensor, progress: Progress | None = None) -> Tensor:
        """Latents to uint8 clips B x F x H x W x 3 on the CPU."""
        return self._decoded(latents, None, progress)

    def decode_frames(self, latents: Tensor, frames: Sequence[int]) -> Tensor:
        """`decode(latents)[:, frames]`, to the bit, for frames in order."""
        return self._decoded(latents, frames)

    def _decoded(self, latents: Tensor, frames: Sequence[int] | None, progress: Progress | None = None) -> Tensor:
        self._check_latents(latents)
        clips = []
        with torch.no_grad():
            for part in latents.split(1 if self.spec.vae_slicing else max(1, len(latents))):
                z = self._to_vae(part.to(device=self._places["vae"], dtype=self.pipe.vae.dtype))
                clips.append(to_uint8(self._pixels(z), frames, self._modules("vae")))
                if progress is not None:
                    progress(sum(map(len, clips)), len(latents))
        return torch.cat(clips)

    def pixels(self, latents: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        """Latents (or some neighbouring frames of them) to float clips B x F x H x W x 3 in [0, 255], with a graph; `decode` rounds them.

        Only `frames`, in order, need be right; others may be black.
        """
        self._check_latents(latents, part=True)
        vae = self.pipe.vae
        # Decoders that are not cut into chunks here checkpoint themselves; one that draws noise would draw other noise the second time.
        if vae._supports_gradient_checkpointing and not any(vae.config.get("decoder_inject_noise") or ()):
            vae.enable_gradient_checkpointing()
        z = self._to_vae(latents.to(device=self._places["vae"], dtype=vae.dtype))
        stride = (self.video.frames - 1) // max(1, self.grid.latents(self.video)[1] - 1)
        return to_floats(self._pixels(z), 1 + stride * (z.shape[2] - 1), frames)

    # ---- video to latents

    def to_latents(self, clips: Tensor) -> Tensor:
        """uint8 clips B x F x H x W x 3 to latents on the CPU: the inverse of `decode`, up to the VAE's loss."""
        latents = self._pictured(clips)
        self._check_latents(latents)
        return latents

    def _pictured(self, clips: Tensor) -> Tensor:
        """The latents of the frames of clips."""
        expected = (self.video.frames, self.video.height, self.video.width, 3)
        if tuple(clips.shape[1:]) != expected:
            raise ModelError(f"Clips have shape {tuple(clips.shape)}, but the model's have {expected} after the batch.")
        vae, latents = self.pipe.vae, []
        with torch.no_grad():
            for clip in clips.split(1):
                pixels = (clip.to(self._places["vae"], torch.float32) / 127.5 - 1.0).permute(0, 4, 1, 2, 3)
                latents.append(self._from_vae(self._from_pixels(pixels.to(vae.dtype)).to(torch.float32)).cpu())
        return torch.cat(latents)

    @property
    def stock_pipeline(self) -> str:
        """Name of the pipeline that samples as this model does, for messages."""
        return str(self.index["_class_name"])

    @property
    def strength(self) -> float | None:
        """Share of the steps from pure noise that samples make which start from a clip; None starts from noise."""
        return None

    def source(self, key: str, clip: Callable[[], Tensor]) -> Tensor:
        """The latents of a clip to start from, on the CPU, cached by key."""
        parts = ("source", self.latents_key(), key)
        latents = self._sources.get(parts)
        if latents is None:
            latents = self._cache.get(parts, lambda: {"source": self.to_latents(clip()[None])[0]})["source"]
        self._sources[parts] = latents
        return latents

    def _from_vae(self, z: Tensor) -> Tensor:
        """The inverse of `_to_vae`. Scaling is affine in every element, so its values at 0 and 1 define it."""
        zero, one = (self._to_vae(torch.full_like(z, value)) for value in (0.0, 1.0))
        return (z - zero) / (one - zero)

    def latents_key(self) -> str:
        """The key of latents: the VAE's files, precision and tiling, the class and the format."""
        tiled = f"{self.pipe.vae.dtype}/{self.spec.vae_tiling}"
        return digest(fingerprint(self.folder, ["vae"]), type(self).__name__, str(self.video), tiled)

    # ---- training

    def _unread(self, transformer: Any) -> set[str]:
        """Parameters of a transformer that never receive a gradient. (Those of optional inputs, such as quoted text, are not counted.)"""
        blocks = self.traits.blocks
        if not self.traits.inputs:
            return set()
        traced = without_gradient(transformer, blocks, self._trial, (type(self).__name__, self.image_to_video))
        return traced | unread_queries(transformer, blocks)

    def _trial(self, transformer: Any) -> Tensor:
        """The output of a transformer of this kind on the meta device for one sample."""
        trial = copy(self)
        # In float32, and without the stock forward of HunyuanVideo-1.5, which looks at values.
        trial.spec = replace(self.spec, train=True, lora=None, packed=True)
        trial.transformer, trial.network, trial.others = transformer, self._adapted(transformer), []
        inputs = {name: tensor[None] for name, tensor in self._batchable(self._trial_inputs()).items()}
        sigma = torch.tensor(0.0 if self.experts.components == ("transformer_2",) else 1.0)
        return trial._forward(empty(1, *self.latent_shape()), sigma, empty(1), inputs)

    def _trial_inputs(self, text: int = 2) -> dict[str, Tensor]:
        """Inputs of one sample on the meta device, as `_encode` gives them, with so many tokens of text."""
        config, widths = self.transformer.config, self.traits.inputs
        inputs = {name: empty(*([text] if name == "text" else []), config[width]) for name, width in widths.items()}
        return inputs | ({"guidance": empty(())} if self.guidance.embedded else {})

    def _prepare_training(self) -> None:
        spec, adapts = self.spec, self.spec.train or self.spec.lora is not None
        self.unread = self._unread(self.transformer) if adapts else set()
        """Parameters of `transformer` that nothing reads."""
        for module in (*self._modules("network"), *self._modules("vae")):
            module.requires_grad_(False)
            module.eval()
        for component, transformer in self.experts.trained.items() if adapts else ():
            dead = self.unread if transformer is self.transformer else self._unread(transformer)
            if spec.lora is not None:
                names = lora.match_targets(transformer, self.lora_targets, self.traits.blocks, dead)
                lora.add_lora(transformer, spec.lora, names, self.experts.noise(component), dead)
            for name, parameter in transformer.named_parameters():
                trained = lora.is_lora(name) if spec.lora is not None else name not in dead
                parameter.requires_grad_(spec.train and trained)

    def blocks(self) -> list[nn.Module]:
        """The transformer's repeated blocks, in order."""
        return self._blocks_of(self.transformer)

    def _blocks_of(self, transformer: Any) -> list[nn.Module]:
        return [block for name in self.traits.blocks for block in getattr(transformer, name)]

    @property
    def lora_targets(self) -> list[str]:
        """Modules that a LoRA adapts: the spec's, or the family's."""
        given = self.spec.lora.targets if self.spec.lora is not None else []
        return given or list(self.traits.lora_targets)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes, by their names in the diffusers transformer; with both experts after the component's."""
        return {name: parameter for name, parameter in self.experts.parameters().items() if parameter.requires_grad}

    def keep(self, levels: Sequence[Keep]) -> None:
        """Set the activations that each block keeps for its backward pass."""
        for transformer in self.experts.trained.values():
            keep_activations(self._blocks_of(transformer), levels)

    def place(self, part: Part, device: str | torch.device) -> None:
        """Move a part; components that are not loaded yet will load there."""
        self._places[part] = torch.device(device)
        move = self._home.move if part == "vae" else nn.Module.to
        for module in self._modules(part):
            move(module, self._places[part])

    def _modules(self, part: str) -> list[nn.Module]:
        if part == "network":
            return [self.network, *self.others]
        names = self.traits.decoders if part == "vae" else self.traits.encoders
        return [module for name in names if (module := getattr(self.pipe, name, None)) is not None]

    # ---- files

    def load_lora(self, folder: str | Path) -> None:
        """Add a saved LoRA to the network, frozen; to both experts where it has one for each."""
        load_trained(self.experts, folder)
        self.place("network", self._places["network"])
        self._set_attention()

    def save(self, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None, merged: bool = False) -> None:
        """Write a LoRA, or a whole diffusers folder when all weights are trained or `merged` is set.

        `weights` replaces parameters by name (an average, or gathered shards) without a second model.
        """
        folder, whole = Path(folder), merged or self.spec.lora is None
        states, merge = save_trained(self.experts, folder, weights or {}, whole=whole)
        if whole:
            export.save_folder(self.folder, folder, states, self.dtype)
        if merge.update:
            self.choices["merged"] = export.describe_merge(merge, self.spec.dtype)
        export.write_card(folder, self, whole=whole)

    # ---- checks

    def _check_latents(self, latents: Tensor, *, part: bool = False) -> None:
        """part: accept fewer frames."""
        expected = self.latent_shape()
        if part and len(expected) > 1 and latents.ndim == len(expected) + 1:
            expected = (expected[0], min(expected[1], latents.shape[2]), *expected[2:])
        if tuple(latents.shape[1:]) != expected:
            raise ModelError(
                f"Latents have shape {tuple(latents.shape)}, but {self.video.frames} frames of {self.video.height} x "
                f"{self.video.width} need (batch, {', '.join(map(str, expected))}). Build them from latent_shape()."
            )


class ImageModel(FamilyModel):
    """A VelocityModel of one-frame clips with Stable Diffusion's VAE, which has no frames, and whose config has the scale and shift of latents."""

    def _to_vae(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        return (latents / config.scaling_factor) + config.shift_factor

    def _pixels(self, z: Tensor) -> Iterable[Tensor]:
        return [pixels[:, :, None] for pixels in super()._pixels(z[:, :, 0])]

    def _from_pixels(self, pixels: Tensor) -> Tensor:
        return super()._from_pixels(pixels[:, :, 0])[:, :, None]
