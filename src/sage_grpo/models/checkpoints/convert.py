"""HunyuanVideo-1.5 checkpoints between the authors' layout and diffusers', as files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.models.checkpoints.checkpoint import read_index, resolve
from sage_grpo.models.checkpoints.export import save_folder
from sage_grpo.models.checkpoints.files import staged_weights, stored_shapes
from sage_grpo.models.checkpoints.original15 import is_original, to_diffusers, to_original
from sage_grpo.models.spec import ModelError, ModelSpec
from sage_grpo.pretrained import weights_fault

PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".distcp")
HOW = """Pickled files can run code, so they are not read here. Where you trust it, make it safetensors yourself:
    python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER all.pt    # only a folder of .distcp files
    python -c "import torch; from safetensors.torch import save_file; d = torch.load('all.pt', weights_only=True); \
d = d.get('model', d); save_file({k: v.contiguous() for k, v in d.items()}, 'model.safetensors')\""""
"""What to do with a checkpoint of the paper's released code, which saves with torch.distributed.checkpoint."""


def read_weights(source: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of those in a folder (of a pipeline: in its transformer)."""
    from safetensors import SafetensorError, safe_open

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
        try:
            with safe_open(file, framework="pt") as content:
                names = list(content.keys())
                twice = weights.keys() & set(names)
                if twice:
                    raise ModelError(
                        f'{file} holds {min(twice)}, as another file of "{folder}" does: give one of the files.'
                    )
                weights |= {name: content.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise ModelError(f"{file} is no safetensors file ({error}). Download it again.") from error
    return weights


def original_to_diffusers(source: Path, base: str, out: Path, dtype: torch.dtype | None) -> int:
    """A copy of the diffusers checkpoint `base` with the weights of `source`; returns how many tensors it took.

    `base` gives all that the authors' layout leaves out (the VAE, text encoders, configurations), and every name and shape to compare with.
    """
    folder = resolve(ModelSpec(path=base))
    pipeline = read_index(folder).get("_class_name", "")
    if not pipeline.startswith("HunyuanVideo15"):
        raise ModelError(
            f'"{base}" holds a {pipeline}; --base must be a HunyuanVideo-1.5 checkpoint in diffusers\' layout.'
        )
    found = read_weights(source)
    if not is_original(found):
        raise ModelError(f'"{source}" is not in the original layout (its first name is {_first(found)}).')
    weights = to_diffusers(found)
    wanted = stored_shapes(folder / "transformer")
    wrong = [name for name in wanted.keys() & weights.keys() if wanted[name] != tuple(weights[name].shape)]
    fault = weights_fault(wanted.keys() - weights.keys(), weights.keys() - wanted.keys(), wrong)
    if fault is not None:
        raise ModelError(f'"{source}" is no checkpoint of the size of "{base}": it {fault}.')
    save_folder(folder, out, "transformer", weights, dtype or _common(weights.values()))
    return len(found)


def diffusers_to_original(source: str, out: Path, dtype: torch.dtype | None) -> int:
    """The transformer of a diffusers checkpoint under its authors' names, as safetensors in `out`; returns how many tensors."""
    found = read_weights(resolve(ModelSpec(path=source)))
    if is_original(found):
        raise ModelError(f'"{source}" is in the original layout already (its first name is {_first(found)}).')
    weights = to_original(found)
    if dtype is not None:
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    with staged_weights(weights, out.with_name(f".{out.name}.tmp")) as staging:
        staging.rename(out)
    return len(weights)


def _common(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of most of the numbers."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda kind: counts[kind])


def _first(weights: dict[str, Tensor]) -> str:
    return min(weights, default="none")
