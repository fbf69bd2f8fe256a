"""Two effects of bfloat16 that decided something, on any CPU (docs/log.md, "Many processes").

    PYTHONPATH=src:tests python benchmarks/precision.py

1. Attention's backward pass on a GPU adds up in any order, so last bits differ between runs. What do they do to the gradient of a LoRA whose
   adapters compute in float32 (peft's way), and in bfloat16 on float32 weights (ours)? One bit in a hundred is flipped by hand.
2. How far apart are a compiled network's velocities with and without gradients, if both may have a graph of their own? (Needs a C++ compiler.)
"""

from __future__ import annotations

import argparse
import tempfile
from unittest import mock

import fsdp_one_gpu as small
import torch
from torch import Tensor

from sage_grpo.distributed.fsdp import Engine
from sage_grpo.models import lora
from sage_grpo.models.network import blocks
from sage_grpo.models.spec import LoraSpec, ModelSpec


def flipped(seed: int, *, float32: bool) -> dict[str, Tensor]:
    """Gradients of a small random LoRA with flipped bits behind every projection of attention."""
    options = argparse.Namespace(device="cpu", width=128, heads=2, layers=3, rank=8, frames=2, size=16)
    generator = torch.Generator().manual_seed(seed)

    def flip(gradient: Tensor) -> Tensor:
        chosen = (torch.rand(gradient.shape, generator=generator) < 0.01).float()
        return (gradient.float() * (1 + chosen * 2**-7)).to(gradient.dtype)

    convert = (lambda network: None) if float32 else lora._compute_in_input_dtype
    with mock.patch.object(lora, "_compute_in_input_dtype", convert):
        network = small.build(options, lora=True, dtype=torch.bfloat16, checkpointing=False)
    for block in network.transformer.transformer_blocks:
        for projection in (block.attn.to_q, block.attn.to_k, block.attn.to_v):
            projection.register_forward_hook(lambda module, inputs, output: output.register_hook(flip) and None)
    small.accumulate(network, Engine(), small.inputs(options, torch.bfloat16), False)
    return {name: parameter.grad for name, parameter in small.trainable(network).items()}


def compiled_apart(folder: str, *, one_graph: bool) -> float:
    """Largest difference between velocities with and without gradients, relative to the largest velocity."""
    torch.compiler.reset()
    keep = blocks.keep_one_graph if one_graph else lambda network: None
    with mock.patch.object(blocks, "keep_one_graph", keep):
        spec = ModelSpec(path=folder, cache=None, lora=LoraSpec(rank=4), dtype="bfloat16", compile=True, device="cpu")
        model = spec.load()
    model.keep(["input"] * len(model.blocks()))
    torch.manual_seed(0)
    x, conditions = torch.randn(1, *model.latent_shape()), model.encode(["a cat"])
    with torch.no_grad():
        without = model.velocity(x, torch.tensor(0.7), conditions)
    difference = model.velocity(x, torch.tensor(0.7), conditions).detach() - without
    return float(difference.abs().max() / without.abs().max())


def main() -> None:
    """Print both."""
    for float32 in (True, False):
        one, other = (flipped(seed, float32=float32) for seed in (1, 2))
        error = sum(float((one[name] - other[name]).double().square().sum()) for name in one) ** 0.5
        size = sum(float(gradient.double().square().sum()) for gradient in one.values()) ** 0.5
        print(
            f"adapters in {'float32' if float32 else 'bfloat16'}: flipped bits move the gradient by {error / size:.1e}"
        )
    import tiny

    with tempfile.TemporaryDirectory() as folder:
        tiny.build("hunyuan15_t2v", folder)
        for one_graph in (False, True):
            difference = compiled_apart(folder, one_graph=one_graph)
            print(f"compiled, {'one graph' if one_graph else 'two graphs'}: velocities differ by {difference:.1e}")


if __name__ == "__main__":
    main()
