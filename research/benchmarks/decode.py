"""Decoding a clip with the VAEs of HunyuanVideo-1.5 and Wan at their real size (random weights): seconds, memory, grey levels.

    PYTHONPATH=src python research/benchmarks/decode.py --out research/benchmarks/results/decode_h200.json            # a CUDA GPU, about 3 minutes
    PYTHONPATH=src python research/benchmarks/decode.py --gradient --dtypes bfloat16                         # with a graph, and back to the latents
    PYTHONPATH=src python research/benchmarks/decode.py --device cpu --small --frames 9 --height 32 --width 48 --dtypes float32   # a trial

For each VAE and dtype: diffusers' own decode of the whole clip, and the package's (sage_grpo.models.network.decoding) with several sizes of chunks,
with weights as they are loaded and in the channels-last layout. A row has the seconds of the quickest of two, the peak GiB above the
weights, and how far its uint8 clip is, in grey levels, from the stock decode and from the package's in one chunk ("once"), both in the
same dtype, and from float32 without TF32. The last convolution is
scaled so that pixels spread over the grey levels as those of a real clip do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models.families.hunyuan15 import causal_mask, vae_attention
from sage_grpo.models.network.decoding import hunyuan15_pixels, to_floats, to_uint8, wan_pixels

SPREAD = 0.4
"""Standard deviation of pixels in [-1, 1]."""


def build(family: str, small: bool) -> Any:
    """A VAE with random weights: the constructors' defaults are the published sizes."""
    from diffusers import AutoencoderKLHunyuanVideo15, AutoencoderKLWan

    if family == "hunyuan15":
        narrow = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 16, 16)} if small else {}
        vae = AutoencoderKLHunyuanVideo15(**narrow)
        for block in vae_attention(vae):  # the stock mask is filled row by row in Python
            block.prepare_causal_attention_mask = causal_mask
        return vae
    return AutoencoderKLWan(**({"base_dim": 4, "num_res_blocks": 1} if small else {}))


def latents(family: str, vae: Any, options: argparse.Namespace) -> Tensor:
    """Latents of one clip; HunyuanVideo-1.5's width is a multiple of 16 (848), Wan's 832."""
    spatial, width = (16, options.width) if family == "hunyuan15" else (8, options.width // 64 * 64)
    channels = vae.config.latent_channels if family == "hunyuan15" else vae.config.z_dim
    shape = (1, channels, (options.frames - 1) // 4 + 1, options.height // spatial, width // spatial)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def scale_pixels(family: str, vae: Any, z: Tensor) -> None:
    """Give pixels a spread, from the first latent frame."""
    pixels = vae.decode(z[:, :, :1]).sample
    factor = SPREAD / float(pixels.float().std())
    conv = vae.decoder.conv_out.conv if family == "hunyuan15" else vae.decoder.conv_out
    conv.weight *= factor
    conv.bias *= factor


def lay_out(decoder: Any, layout: torch.memory_format) -> None:
    """Put the weights of the convolutions in another order."""
    for conv in (module for module in decoder.modules() if isinstance(module, torch.nn.Conv3d)):
        conv.weight.data = conv.weight.data.contiguous(memory_format=layout)


def measure(run: Callable[[], Tensor], device: torch.device, repeat: int) -> tuple[dict[str, Any], Tensor | None]:
    """Seconds of the quickest of `repeat` after one to warm up, and peak GiB above what was there; the clip."""
    cuda = device.type == "cuda"
    seconds, peak, clip = float("inf"), 0.0, None
    try:
        for _ in range(repeat + 1):
            clip = None
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            clip = run()
            if cuda:
                torch.cuda.synchronize()
                peak = max(peak, (torch.cuda.max_memory_allocated() - before) / 2**30)
            seconds = min(seconds, time.perf_counter() - start)
    except torch.OutOfMemoryError:
        clip = None
    if cuda:
        torch.cuda.empty_cache()
    if clip is None:
        return {"seconds": None, "gib_above": None, "failed": "out of memory"}, None
    return {"seconds": seconds, "gib_above": peak}, clip


def differences(clip: Tensor | None, reference: Tensor | None, name: str) -> dict[str, float]:
    """Grey levels between two clips."""
    if clip is None or reference is None:
        return {}
    off = (clip.short() - reference.short()).abs()
    share = {f"{name}_share_over_{level}": float((off > level).float().mean()) for level in (0, 1)}
    return {f"{name}_largest": int(off.max()), f"{name}_mean": float(off.float().mean()), **share}


def variants(family: str, vae: Any, z: Tensor, chunks: list[int]) -> Iterable[tuple[str, Callable[[], Tensor]]]:
    """Ways to decode."""
    yield "stock", lambda: to_uint8([vae.decode(z, return_dict=False)[0]])
    if family == "wan":
        yield "frames", lambda: to_uint8(wan_pixels(vae, z))
        yield "frames, channels last", lambda: to_uint8(wan_pixels(vae, z))
        return
    yield "one chunk", lambda: to_uint8(hunyuan15_pixels(vae, z, z.shape[2]))
    yield "chunks, default", lambda: to_uint8(hunyuan15_pixels(vae, z))
    for size in chunks:
        yield f"chunks of {size}", lambda size=size: to_uint8(hunyuan15_pixels(vae, z, size))
    yield "chunks, default, channels last", lambda: to_uint8(hunyuan15_pixels(vae, z))


def gradient_rows(family: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of decoding with a graph and the way back to the latents, by the package (blocks of frames run again) and by the stock decoder."""
    device, rows = torch.device(options.device), []
    torch.manual_seed(0)
    vae = build(family, options.small).to(device).eval().requires_grad_(False)
    z = latents(family, vae, options).to(device)
    weights = torch.randn(3, generator=torch.Generator().manual_seed(2)).to(device)

    def back(pixels: Callable[[Tensor], Iterable[Tensor]], given: Tensor, count: int) -> Tensor:
        leaf = given.detach().requires_grad_()
        clip = to_floats(pixels(leaf), count)
        return torch.autograd.grad((clip * weights).mean(), leaf)[0]

    for dtype in options.dtypes:
        vae.to(dtype=getattr(torch, dtype))
        given, count = z.to(getattr(torch, dtype)), 4 * z.shape[2] - 3
        ways: dict[str, Callable[[Tensor], Iterable[Tensor]]] = {
            "stock": lambda x: [vae.decode(x, return_dict=False)[0]]
        }
        if family == "wan":
            ways["frames"] = lambda x: wan_pixels(vae, x)
        else:
            ways["chunks, default"] = lambda x: hunyuan15_pixels(vae, x)
            ways |= {
                f"chunks of {size}": lambda x, size=size: hunyuan15_pixels(vae, x, size) for size in options.chunks
            }
        for name, pixels in ways.items():
            figures, _ = measure(partial(back, pixels, given, count), device, options.repeat)
            rows.append({"family": family, "dtype": dtype, "way": f"gradient, {name}", **figures})
            print(json.dumps(rows[-1]), flush=True)
    return rows


@torch.no_grad()
def family_rows(family: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one VAE."""
    device, rows = torch.device(options.device), []
    torch.manual_seed(0)
    vae = build(family, options.small).to(device).eval()
    z = latents(family, vae, options).to(device)
    scale_pixels(family, vae, z)
    with torch.backends.cudnn.flags(allow_tf32=False):  # by default convolutions round float32 to 10 bits on a GPU
        best = to_uint8(hunyuan15_pixels(vae, z) if family == "hunyuan15" else wan_pixels(vae, z))
    for dtype in options.dtypes:
        vae.to(dtype=getattr(torch, dtype))
        given, whole, once = z.to(getattr(torch, dtype)), None, None
        for name, run in variants(family, vae, given, options.chunks):
            last = name.endswith("channels last")
            lay_out(vae.decoder, torch.channels_last_3d if last else torch.contiguous_format)
            figures, clip = measure(run, device, options.repeat)
            whole = clip if name == "stock" else whole
            once = clip if name == "one chunk" else once
            row = {"family": family, "dtype": dtype, "way": name, **figures}
            row |= {"grey_std": float(clip.float().std())} if clip is not None else {}
            row |= (
                differences(clip, whole, "stock") | differences(clip, once, "once") | differences(clip, best, "float32")
            )
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["hunyuan15", "wan"], choices=["hunyuan15", "wan"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--chunks", nargs="*", type=int, default=[1, 2, 3, 5], help="latent frames of a chunk")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=848)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="narrow networks, to try the script out")
    parser.add_argument("--gradient", action="store_true", help="decode with a graph, and go back to the latents")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    of = gradient_rows if options.gradient else family_rows
    rows = [row for family in options.families for row in of(family, options)]
    hardware = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    clip = {"frames": options.frames, "height": options.height, "width": options.width}
    report = {"hardware": hardware, "torch": torch.__version__, "clip": clip, "rows": rows}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
