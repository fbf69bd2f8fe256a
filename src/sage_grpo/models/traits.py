"""The constants of a diffusers family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sage_grpo.models.codec import Codec
from sage_grpo.types import VideoSpec

IMAGE = VideoSpec(frames=1, height=1024, width=1024, fps=1.0)  # default format of models of images
JOINT_ATTENTION = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
)
"""Attention of two streams that attend together: modules that a LoRA adapts."""
LAST_QUERIES = ("LAST.attn.add_q_proj.", "LAST.attn.norm_added_q.")
"""The text's queries in the last block of such a network, whose answers nothing reads: their gradient is zero."""
CROSS_ATTENTION = (
    *("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
    *("attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0"),
)
"""Attention of the video to itself and then to the text."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The constants of a family."""

    pipelines: tuple[str, ...]  # classes of diffusers pipelines whose checkpoints the family runs
    components: tuple[str, ...]  # components that a checkpoint must have besides transformer, VAE and scheduler
    video: VideoSpec  # clip format where neither the spec nor the checkpoint names one
    guidance_scale: float  # guidance where neither the spec nor the checkpoint names one
    blocks: Mapping[str, str]
    """Names of the transformer's lists of repeated blocks, in order, each with the config's name for their number."""
    lora_targets: tuple[str, ...]  # modules that a LoRA adapts by default
    encoders: tuple[str, ...]  # components that only encoding needs; they load on demand
    codec: type[Codec] = Codec  # the use of its VAE
    read_here: tuple[str, ...] = ()  # components that the family reads itself
    decoders: tuple[str, ...] = ("vae",)  # components that make a clip of latents
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Inputs that the network reads of a prompt, each with the config's name for its width: "text" has tokens, any other is one vector."""
    unread: tuple[str, ...] = ()
    """Beginnings of names of parameters that no output depends on, such as LAST.ff_context: the last block's text stream, which nothing reads. They
    are not trained: parameters without gradients break sharded optimizers and checkpoints."""
    text_tokens: int = 0  # tokens of a prompt, for the cost of training: the padded length, or that of a long prompt
    ragged: tuple[tuple[str, int], ...] = ()  # inputs of a block (name, dimension) whose length differs between prompts
    padded: bool = False  # the network attends to its text's padding, so that encodings hold it and all have one length
    even_sigmas: bool = False
    """The pipeline hands its scheduler evenly spaced sigmas; otherwise the scheduler spaces them."""
    dynamic_shift: bool = False  # the pipeline hands its scheduler a shift that grows with the number of tokens
    embeds_guidance: bool = False
    """Guidance is an input of the network where its config says guidance_embeds; elsewhere there is none by default."""
    options: Mapping[str, float | None] = field(default_factory=dict)
    """Options of the family's own (model.options) and their defaults; None leaves it to the model."""
    whole: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Options that are whole numbers, with the least and the most."""

    def blocks_of(self, transformer: Any) -> list[nn.Module]:
        return [block for name in self.blocks for block in getattr(transformer, name)]
