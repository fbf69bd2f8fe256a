"""HunyuanVideo-1.5 checkpoints between the layout of their authors, which the paper's released code trains, and diffusers'.

The two networks are the same; names differ, the refiner's q, k and v are one matrix there, and the last modulation has its halves (shift, scale)
in the other order. So every tensor of one layout is a tensor, a third or a swapped tensor of the other, and the inverse is exact.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import read_index, resolve
from sage_grpo.models.checkpoints.export import save_folder, staged_weights
from sage_grpo.models.checkpoints.files import opened_weights, stored_shapes
from sage_grpo.models.spec import ModelSpec
from sage_grpo.utils.pretrained import weights_fault

PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".distcp")
HOW = """Pickled files can run code, so they are not read here. Where you trust it, make it safetensors yourself:
    python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER all.pt    # only a folder of .distcp files
    python -c "import torch; from safetensors.torch import save_file; d = torch.load('all.pt', weights_only=True); \
d = d.get('model', d); save_file({k: v.contiguous() for k, v in d.items()}, 'model.safetensors')\""""
"""Instructions for a checkpoint of the paper's released code, which saves with torch.distributed.checkpoint."""
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Wrappers that training leaves inside names: compilation, sharding, gradient checkpointing."""

_LAYERS = json.loads((resources.files("sage_grpo.models.checkpoints") / "hunyuan15_layers.json").read_text())
DIFFUSERS = {original: tuple(names) for original, names in _LAYERS.items()}
"""Diffusers' names of an original layer, # for the number of a block; several share a matrix there, in this order."""
ORIGINAL = {name: original for original, names in DIFFUSERS.items() for name in names}


def to_diffusers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under diffusers' names; a name that is not in the table is refused."""
    renamed: dict[str, Tensor] = {}
    unknown = []
    for full, tensor in weights.items():
        layer, number, kind = _split(_unwrapped(full))
        targets = [f"{name}.{kind}".replace("#", number) for name in DIFFUSERS.get(layer, ())]
        if not targets:
            unknown.append(full)
            continue
        parts = tensor.chunk(len(targets)) if len(targets) > 1 else [_swap_if(tensor, targets[0])]
        if len(parts) != len(targets) or any(part.shape != parts[0].shape for part in parts):
            raise ModelError(f"{full} has shape {tuple(tensor.shape)}: q, k and v cannot be equal thirds of it.")
        for target, part in zip(targets, parts):
            if target in renamed:
                raise ModelError(
                    f"{full} gives {target}, which another tensor gave already: are these two checkpoints?"
                )
            renamed[target] = part.clone() if len(targets) > 1 else part  # a view would keep the whole matrix in memory
    _refuse(unknown, "the original HunyuanVideo-1.5 layout")
    return renamed


def to_original(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: the same weights under the authors' names."""
    shared: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in weights.items():
        layer, number, kind = _split(name)
        if layer not in ORIGINAL:
            unknown.append(name)
            continue
        source = f"{ORIGINAL[layer]}.{kind}".replace("#", number)
        shared.setdefault(source, {})[layer] = _swap_if(tensor, name)
    _refuse(unknown, "diffusers' HunyuanVideo-1.5 layout")
    renamed = {}
    for source, parts in shared.items():
        names = DIFFUSERS[_split(source)[0]]
        lacking = [name.partition(".#.")[2] for name in names if name not in parts]
        if lacking:
            raise ModelError(f"{source} needs q, k and v together, and the weights lack its {', '.join(lacking)}.")
        renamed[source] = torch.cat([parts[name] for name in names]) if len(names) > 1 else parts[names[0]]
    return renamed


def is_original(names: Iterable[str]) -> bool:
    """True if these are names of the authors' layout."""
    return any(_unwrapped(name).startswith(("double_blocks.", "img_in.", "txt_in.")) for name in names)


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("model.").removeprefix("module.")  # the entry of a checkpoint, data parallelism


def _split(name: str) -> tuple[str, str, str]:
    """The layer of a name as in the tables, the number of its block, and the name of the tensor in it."""
    layer, _, kind = name.rpartition(".")
    number = re.search(r"\.(\d+)\.", layer)
    return (layer, "", kind) if number is None else (layer.replace(number[0], ".#.", 1), number[1], kind)


def _swap_if(tensor: Tensor, name: str) -> Tensor:
    """Swap scale and shift in the network's last modulation; twice is the identity."""
    if name.rpartition(".")[0] != "norm_out.linear":
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


def read_weights(source: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of those in a folder (of a pipeline: in its transformer)."""
    if not source.exists():
        raise ModelError(f'"{source}" is neither a file nor a folder.')
    folder = source / "transformer" if (source / "transformer").is_dir() else source
    files = [source] if source.is_file() else sorted(folder.glob("*.safetensors"))
    pickled = [file for file in ([source] if source.is_file() else folder.iterdir()) if file.suffix in PICKLED]
    if pickled and (source.is_file() or not files):
        raise ModelError(f"{pickled[0]} is a pickled file. {HOW}")
    if not files:
        raise ModelError(f'"{folder}" holds no .safetensors file.')
    weights: dict[str, Tensor] = {}
    for file in files:
        with opened_weights(file) as content:
            names = list(content.keys())
            twice = weights.keys() & set(names)
            if twice:
                raise ModelError(
                    f'{file} holds {min(twice)}, as another file of "{folder}" does: give one of the files.'
                )
            weights |= {name: content.get_tensor(name) for name in names}
    return weights


def original_to_diffusers(source: Path, base: str, out: Path, dtype: torch.dtype | None) -> int:
    """A copy of the diffusers checkpoint `base`, whose names and shapes it must have, with the weights of `source`; returns the number of tensors."""
    folder = resolve(ModelSpec(path=base))
    pipeline = read_index(folder).get("_class_name", "")
    if not pipeline.startswith("HunyuanVideo15"):
        raise ModelError(
            f'"{base}" holds a {pipeline}; --base must be a HunyuanVideo-1.5 checkpoint in diffusers\' layout.'
        )
    originals = read_weights(source)
    if not is_original(originals):
        raise ModelError(
            f'"{source}" is not in the original layout (its first name is {min(originals, default="none")}).'
        )
    weights = to_diffusers(originals)
    wanted = stored_shapes(folder / "transformer")
    wrong = [name for name in wanted.keys() & weights.keys() if wanted[name] != tuple(weights[name].shape)]
    fault = weights_fault(wanted.keys() - weights.keys(), weights.keys() - wanted.keys(), wrong)
    if fault is not None:
        raise ModelError(f'"{source}" is not a checkpoint of the size of "{base}": it {fault}.')
    save_folder(folder, out, {"transformer": weights}, dtype or _common(weights.values()))
    return len(originals)


def diffusers_to_original(source: str, out: Path, dtype: torch.dtype | None) -> int:
    """The transformer of a diffusers checkpoint under its authors' names, as safetensors in `out`; returns the number of tensors."""
    stored = read_weights(resolve(ModelSpec(path=source)))
    if is_original(stored):
        raise ModelError(f'"{source}" is in the original layout already (its first name is {min(stored)}).')
    weights = to_original(stored)
    if dtype is not None:
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    with staged_weights(weights, out.with_name(f".{out.name}.tmp")) as staging:
        staging.rename(out)
    return len(weights)


def _common(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of most of the numbers."""
    counts = Counter[torch.dtype]()
    for tensor in tensors:
        counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0]
