"""HunyuanVideo-1.5 at its real size, with random weights, on one GPU: speed, memory and whole iterations of training.

    PYTHONPATH=src python research/benchmarks/full_size.py write /tmp/hunyuan15            # a checkpoint folder, 19 GB
    PYTHONPATH=src python research/benchmarks/full_size.py measure /tmp/hunyuan15 --out full_size.json
    PYTHONPATH=src python research/benchmarks/full_size.py train /tmp/hunyuan15 --out full_size_train.json

`measure` times one forward pass (diffusers' own, packed, compiled), and takes the peak memory of two backward passes as an update does
them, with a LoRA and with all weights, plain and sharded by FSDP over one process, beside the formula of sage_grpo.plan.formulas; then the
VAE's decoder. `train` runs one iteration of the recipe hunyuan15_lora/sage twice, in a plain process and under FSDP, and compares
what they logged. The transformer and the VAE have their real size; the text encoders are small, for want of a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_one_gpu as ruler
import torch

PROMPT = "a red fox trots through fresh snow at dawn, breath steaming, the camera tracking low beside it"
TOLERANCE = {"lora": 2e-3, "full": 5e-2}
"""Relative differences between FSDP and no FSDP that bfloat16 explains: with all weights, autocast rounds other values."""


def write(folder: Path) -> None:
    """A random checkpoint in diffusers' layout."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    import tiny

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        transformer = HunyuanVideo15Transformer3DModel(task_type="t2v")
        vae = AutoencoderKLHunyuanVideo15()
        text = Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=300,
                hidden_size=3584,
                intermediate_size=3584,
                num_hidden_layers=4,
                num_attention_heads=28,
                num_key_value_heads=4,
                max_position_embeddings=2048,
                rope_parameters={"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
            )
        )
        byt5 = T5EncoderModel(T5Config(vocab_size=384, d_model=1472, d_kv=64, d_ff=1472, num_layers=1, num_heads=4))
    HunyuanVideo15Pipeline(
        transformer=transformer,
        vae=vae,
        text_encoder=text,
        text_encoder_2=byt5,
        tokenizer=tiny.qwen_tokenizer(),
        tokenizer_2=ByT5Tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    ).save_pretrained(folder)


def clocked(run: Callable[[], Any], *, repeat: int = 1) -> dict[str, float]:
    """Seconds and peak GiB of one call, the last of `repeat`."""
    for _ in range(repeat - 1):
        run()
    return ruler.measure("cuda", run)[1]


def load(options: argparse.Namespace, **fields: Any) -> Any:
    """The checkpoint through the adapter that training uses."""
    from sage_grpo.models.spec import ModelSpec

    spec = ModelSpec(
        path=str(options.folder),
        dtype="bfloat16",
        device="cuda",
        cache=None,
        frames=options.frames,
        height=options.height,
        width=options.width,
        **fields,
    )
    return spec.load()


def draw(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and their noise level."""
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn((1, *model.latent_shape()), generator=generator, device="cuda"), torch.tensor(0.9)


def speed(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """One forward pass without guidance: the stock forward, packed, compiled."""
    model = load(options, train=False)
    x, sigma = draw(model)
    conditions = model.encode([PROMPT])

    def forward() -> None:
        with torch.no_grad():
            model.velocity(x, sigma, conditions, guidance=1.0)

    packed = clocked(forward, repeat=3)
    model.spec = dataclasses.replace(model.spec, packed=False)
    stock = clocked(forward, repeat=2)
    model.spec = dataclasses.replace(model.spec, packed=True)
    model.transformer.compile_repeated_blocks()
    first = clocked(forward)
    compiled = clocked(forward, repeat=3)
    report["forward"] = {
        "stock": stock,
        "packed": packed,
        "compiled": compiled,
        "first_compiled_seconds": first["seconds"],
    }
    print(
        f"forward: stock {stock['seconds']:.2f} s {stock['gib_peak']:.1f} GiB, packed {packed['seconds']:.2f} s "
        f"{packed['gib_peak']:.1f} GiB, compiled {compiled['seconds']:.2f} s (first {first['seconds']:.0f} s); stock / packed "
        f"{stock['seconds'] / packed['seconds']:.2f}, packed / compiled {packed['seconds'] / compiled['seconds']:.2f}",
        flush=True,
    )
    for tiling in (True, False):
        if tiling:
            model.pipe.vae.enable_tiling()
        else:
            model.pipe.vae.disable_tiling()
        figures = clocked(lambda: model.decode(x))
        report["decode_tiled" if tiling else "decode"] = figures
        print(f"decode {'tiled' if tiling else 'whole'}: {figures}", flush=True)


def backward(options: argparse.Namespace, report: dict[str, Any], *, lora: bool, compiled: bool = False) -> bool:
    """Two backward passes with guidance and gradient checkpointing, plain and under FSDP; returns whether they agree."""
    from sage_grpo.distributed.spec import ParallelSpec
    from sage_grpo.models.spec import LoraSpec
    from sage_grpo.plan.formulas import HUNYUAN15, RunShape, memory
    from sage_grpo.training.offload import distribute

    model = load(options, lora=LoraSpec(rank=32) if lora else None, compile=compiled)
    model.place("vae", "cpu")
    model.keep(["input"] * len(model.blocks()))
    conditions = model.encode([PROMPT])
    model.unload_text()
    x, sigma = draw(model)
    kind = "lora" if lora else "full"
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if ".lora_B." in name:
                parameter.normal_(std=0.02)

    def run(engine: Any) -> dict[str, float]:
        engine.begin()
        for last in (False, True):  # the second pass meets the gradients of the first, as in an update
            if last:
                engine.synchronize()
            v = model.velocity(x, sigma, conditions)
            (gradient,) = torch.autograd.grad(v.square().mean(), v, retain_graph=True)
            v.backward(gradient)
        return {"loss": float(v.detach().square().mean()), "norm": engine.clip(model.trainable().values(), 1e9)}

    def forward() -> None:
        with torch.no_grad():
            model.velocity(x, sigma, conditions, guidance=1.0)

    results: dict[str, Any] = {}
    for name, world in (("plain", None), ("fsdp", options.world)):
        from sage_grpo.distributed.fsdp import Engine

        engine = Engine() if world is None else distribute(model, ParallelSpec(), world)
        values: dict[str, float] = {}
        for parameter in model.trainable().values():
            parameter.grad = None
        if compiled:  # once to compile; the variants of one way of running must not count against the other's limit
            torch.compiler.reset()
            run(engine)
            model.network.zero_grad(set_to_none=True)
        figures = clocked(lambda e=engine, v=values: v.update(run(e)))
        results[name] = {**values, **figures, "seconds": figures["seconds"] / 2}
        results[name]["forward_seconds"] = clocked(forward, repeat=2)["seconds"]
    plain, sharded = results["plain"], results["fsdp"]
    error = max(abs(plain[key] - sharded[key]) / abs(plain[key]) for key in ("loss", "norm"))
    tokens = sum(tensor.shape[0] for tensor in conditions[0].tensors.values())
    job = RunShape(
        lora_rank=32 if lora else None,
        frames=options.frames,
        height=options.height,
        width=options.width,
        text_tokens=tokens,
        anchor=False,
    )
    formula = ruler.in_gib(memory(HUNYUAN15, job))
    key = f"backward_{kind}{'_compiled' if compiled else ''}"
    report[key] = {**results, "error": error, "ok": error < TOLERANCE[kind], "formula_gib": formula}
    print(
        f"{key}: peak {plain['gib_peak']:.1f} GiB plain, {sharded['gib_peak']:.1f} FSDP, formula {formula['total']:.1f} "
        f"{formula}; {plain} {sharded}; error {error:.1e}",
        flush=True,
    )
    return error < TOLERANCE[kind]


def measure(options: argparse.Namespace) -> int:
    """All measurements; 1 when FSDP and no FSDP differ."""
    from sage_grpo.distributed.spec import ParallelSpec
    from sage_grpo.distributed.world import start

    os.environ.update(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    )
    options.world = start(ParallelSpec(timeout=300), "cuda")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["clip"] = [options.frames, options.height, options.width]
    fine = True
    parts: dict[str, Callable[[], Any]] = {
        "speed": lambda: speed(options, report),
        "lora": lambda: backward(options, report, lora=True),
        "compiled": lambda: backward(options, report, lora=True, compiled=True),
        "full": lambda: backward(options, report, lora=False),
    }
    for name in options.parts or parts:
        fine = parts[name]() is not False and fine
        gc.collect()
        torch.cuda.empty_cache()
        save(options, report)
    options.world.close()
    return 0 if fine else 1


def train(options: argparse.Namespace) -> int:
    """One iteration of the LoRA recipe, plain and under FSDP; 1 when their logs differ."""
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows: dict[str, dict[str, float]] = {}
    prompts = options.folder / "prompts.txt"
    prompts.write_text(PROMPT + "\n")
    arguments = [
        *("train", "--recipe", "hunyuan15_lora/sage", "--model.path", str(options.folder), "--model.cache", "null"),
        *("--data.prompts", str(prompts), "--data.eval_prompts", "null", "--evaluate.every", "0", "--iterations", "1"),
        *("--batch.prompts", "1", "--batch.group_size", "2", "--rollout.steps", "4", "--update.step_fraction", "1"),
        *("--rewards", '[{"name": "video_stats", "weights": {"sharpness": 1.0, "flicker": -1.0}}]'),
        *("--keep.videos_every", "0", "--log.tensorboard", "false", "--log.progress", "false"),
    ]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
    for name, start in (("plain", ["-m", "sage_grpo"]), ("fsdp", [*torchrun, "-m", "sage_grpo"])):
        out = options.folder / f"run-{name}"
        begin = time.perf_counter()
        subprocess.run([sys.executable, *start, *arguments, "--out", str(out)], check=True)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        row = {key: value for line in lines for key, value in json.loads(line).items()}
        rows[name] = {**row, "wall_seconds": time.perf_counter() - begin}
    # The policy loss is no measure: advantages times ratios near 1 cancel.
    names = ("reward/total", "advantage/std", "kl/total", "gradient/norm")
    errors = {name: abs(rows["plain"][name] - rows["fsdp"][name]) / (abs(rows["plain"][name]) or 1.0) for name in names}
    report |= {"runs": rows, "errors": errors, "ok": max(errors.values()) < TOLERANCE["lora"]}
    save(options, report)
    print(json.dumps(report, indent=1))
    return 0 if report["ok"] else 1


def save(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write what there is."""
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1))


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "measure", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="write the results as JSON")
    parser.add_argument("--parts", nargs="*", default=None, help="of measure: speed, lora, compiled, full")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=848)
    options = parser.parse_args()
    if options.what == "write":
        write(options.folder)
        return 0
    return measure(options) if options.what == "measure" else train(options)


if __name__ == "__main__":
    raise SystemExit(main())
