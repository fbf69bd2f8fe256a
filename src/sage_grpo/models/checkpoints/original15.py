"""Names of HunyuanVideo-1.5's transformer in its authors' layout, which the paper's released code trains, and in diffusers'.

The two networks are the same; names differ, the refiner's q, k and v are one matrix there, and the last modulation has its halves (shift, scale)
in the other order. So every tensor of one layout is a tensor, a third or a swapped tensor of the other, and the way back is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sage_grpo.models.spec import ModelError

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What training leaves inside names: compilation, sharding, gradient checkpointing."""
PREFIXES = ("model.", "module.")
"""What it leaves before them: the entry of a checkpoint, data parallelism."""
FUSED = ("attn.to_q", "attn.to_k", "attn.to_v")

_PLAIN = {
    "time_in.mlp.0": "time_embed.timestep_embedder.linear_1",
    "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
    "time_r_in.mlp.0": "time_embed.timestep_embedder_r.linear_1",
    "time_r_in.mlp.2": "time_embed.timestep_embedder_r.linear_2",
    "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
    "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
    "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
    "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
    "txt_in.input_embedder": "context_embedder.proj_in",
    "byt5_in.layernorm": "context_embedder_2.norm",
    "byt5_in.fc1": "context_embedder_2.linear_1",
    "byt5_in.fc2": "context_embedder_2.linear_2",
    "byt5_in.fc3": "context_embedder_2.linear_3",
    "vision_in.proj.0": "image_embedder.norm_in",
    "vision_in.proj.1": "image_embedder.linear_1",
    "vision_in.proj.3": "image_embedder.linear_2",
    "vision_in.proj.4": "image_embedder.norm_out",
    "img_in.proj": "x_embedder.proj",
    "cond_type_embedding": "cond_type_embed",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
_REFINER = {
    "norm1": "norm1",
    "norm2": "norm2",
    "self_attn_proj": "attn.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm_out.linear",
}
_BLOCK = {
    "img_mod.linear": "norm1.linear",
    "txt_mod.linear": "norm1_context.linear",
    "img_attn_q": "attn.to_q",
    "img_attn_k": "attn.to_k",
    "img_attn_v": "attn.to_v",
    "img_attn_q_norm": "attn.norm_q",
    "img_attn_k_norm": "attn.norm_k",
    "img_attn_proj": "attn.to_out.0",
    "txt_attn_q": "attn.add_q_proj",
    "txt_attn_k": "attn.add_k_proj",
    "txt_attn_v": "attn.add_v_proj",
    "txt_attn_q_norm": "attn.norm_added_q",
    "txt_attn_k_norm": "attn.norm_added_k",
    "txt_attn_proj": "attn.to_add_out",
    "img_mlp.fc1": "ff.net.0.proj",
    "img_mlp.fc2": "ff.net.2",
    "txt_mlp.fc1": "ff_context.net.0.proj",
    "txt_mlp.fc2": "ff_context.net.2",
}
_LISTS = (
    ("txt_in.individual_token_refiner.blocks", "context_embedder.token_refiner.refiner_blocks", _REFINER),
    ("double_blocks", "transformer_blocks", _BLOCK),
)
_SWAPPED = "norm_out.linear"
"""Of the whole network, not of a refiner's block."""


def to_diffusers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under diffusers' names; a name that the map does not know is refused."""
    found: dict[str, Tensor] = {}
    unknown = []
    for full, tensor in weights.items():
        name = _unwrapped(full)
        targets = _targets(name)
        if not targets:
            unknown.append(full)
            continue
        parts = tensor.chunk(len(targets)) if len(targets) > 1 else [_swap_if(tensor, targets[0])]
        if len(parts) != len(targets) or any(part.shape != parts[0].shape for part in parts):
            raise ModelError(f"{full} has shape {tuple(tensor.shape)}: q, k and v cannot be equal thirds of it.")
        for target, part in zip(targets, parts):
            if target in found:
                raise ModelError(
                    f"{full} gives {target}, which another tensor gave already: are these two checkpoints?"
                )
            found[target] = part.clone() if len(targets) > 1 else part  # a third would hold on to the whole
    _refuse(unknown, "the original HunyuanVideo-1.5 layout")
    return found


def to_original(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back."""
    found: dict[str, Tensor] = {}
    thirds: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in weights.items():
        source, part = _source(name)
        if not source:
            unknown.append(name)
        elif part:
            thirds.setdefault(source, {})[part] = tensor
        else:
            found[source] = _swap_if(tensor, name)
    _refuse(unknown, "diffusers' HunyuanVideo-1.5 layout")
    for source, parts in thirds.items():
        lacking = [part for part in FUSED if part not in parts]
        if lacking:
            raise ModelError(f"{source} needs q, k and v together, and the weights lack its {', '.join(lacking)}.")
        found[source] = torch.cat([parts[part] for part in FUSED])
    return found


def is_original(names: Iterable[str]) -> bool:
    """Whether these are names of the authors' layout."""
    return any(_unwrapped(name).startswith(("double_blocks.", "img_in.", "txt_in.")) for name in names)


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _targets(name: str) -> list[str]:
    """Diffusers' names of an original one: three for a fused matrix, none where it is unknown."""
    stem, _, kind = name.rpartition(".")
    if stem in _PLAIN:
        return [f"{_PLAIN[stem]}.{kind}"]
    for theirs, ours, names in _LISTS:
        match = re.fullmatch(rf"{re.escape(theirs)}\.(\d+)\.(.+)", stem)
        if match and match[2] in names:
            return [f"{ours}.{match[1]}.{names[match[2]]}.{kind}"]
        if match and match[2] == "self_attn_qkv" and names is _REFINER:
            return [f"{ours}.{match[1]}.{part}.{kind}" for part in FUSED]
    return []


def _source(name: str) -> tuple[str, str]:
    """The original name of a diffusers one, and which third of it this is ("" for all of it); ("", "") where it is unknown."""
    stem, _, kind = name.rpartition(".")
    for theirs, ours in _PLAIN.items():
        if stem == ours:
            return f"{theirs}.{kind}", ""
    for theirs, ours, names in _LISTS:
        match = re.fullmatch(rf"{re.escape(ours)}\.(\d+)\.(.+)", stem)
        if match and names is _REFINER and match[2] in FUSED:
            return f"{theirs}.{match[1]}.self_attn_qkv.{kind}", match[2]
        for one, other in names.items() if match else ():
            if match and match[2] == other:
                return f"{theirs}.{match[1]}.{one}.{kind}", ""
    return "", ""


def _swap_if(tensor: Tensor, name: str) -> Tensor:
    """Scale and shift change places in the last modulation; twice is nothing."""
    if name.rpartition(".")[0] != _SWAPPED:
        return tensor
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


def _refuse(unknown: list[str], layout: str) -> None:
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ModelError(
            f"Not names of {layout}: {', '.join(sorted(unknown)[:5])}{more}. Nothing was written: a weight that is left out would be "
            "random later."
        )
