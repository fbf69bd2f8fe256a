"""Predictions of `sage-grpo plan` against real iterations of training at the real size, with random weights made on the GPU.

    PYTHONPATH=src python research/benchmarks/plan_vs_measured.py --out research/benchmarks/results/plan_vs_measured_h200.json

HunyuanVideo-1.5 and Wan 2.1 1.3B with a LoRA of rank 32, each at two lengths, each with `sage` (all steps explore, anchor) and with `branch`: one
iteration of two clips and two steps by the trainer itself, with its own clock and its own peaks, after a warm-up. No file of weights
is read or written. Prints predicted and measured seconds and GiB of every phase; `--out` also has the factors that would make the
formulas exact for every case (`fit`), from which the constants in sage_grpo/plan/formulas.py are refitted. About 180 s on an H200.
`--small` runs tiny networks on any machine, to try the command itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.world import World
from sage_grpo.models.checkpoints.from_configs import assembled, family_class, plain
from sage_grpo.models.devices import DTYPES, choose_device, load_dtypes
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.plan import hardware
from sage_grpo.plan.architecture import Architecture, build_architecture, find_architecture
from sage_grpo.plan.costs import Forecast, choose_activations, forecast
from sage_grpo.plan.formulas import (
    GIB,
    NetworkShape,
    Rates,
    RunShape,
    backward_seconds,
    decode_seconds,
    forward_seconds,
)
from sage_grpo.plan.published import COMPONENTS, PUBLISHED, Configs
from sage_grpo.recipes.methods import METHODS
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import assemble
from sage_grpo.training import config as c
from sage_grpo.training.inputs import Inputs

PATHS = {
    "wan": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "hunyuan15": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
}
WIDTHS = {"wan": 832, "hunyuan15": 848}
SMALL = {
    "wan": {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2, "text_dim": 16, "freq_dim": 16},
    "hunyuan15": {
        **{"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "num_refiner_layers": 1},
        **{"rope_axes_dim": (4, 6, 6), "text_embed_dim": 16, "text_embed_2_dim": 12, "image_embed_dim": 8},
    },
}  # fmt: skip
SMALL_VAE = {
    "wan": {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    "hunyuan15": {"block_out_channels": (32, 64, 64, 64, 64), "layers_per_block": 1},
}
KEEP: dict[str, Any] = {"auto": "auto", "input": True, "attention": "attention", "all": False}
PHASES = ("rollout", "decode", "reward", "update")


def configure(options: argparse.Namespace, family: str, frames: int, method: str) -> c.TrainConfig:
    """One prompt, two clips, two steps, of which the first explores."""
    small = options.small
    base = c.TrainConfig(
        iterations=100,
        model=ModelSpec(
            path=PATHS[family],
            dtype="float32" if small else "bfloat16",
            lora=LoraSpec(rank=32),
            frames=frames,
            height=32 if small else 480,
            width=32 if small else WIDTHS[family],
            cache=None,
            compile=options.compile,
        ),
        rewards=[RewardSpec(name="video_stats", weights={"brightness": 1.0})],
        batch=c.BatchConfig(prompts=1, group_size=2, micro_batch=1),
        rollout=c.RolloutConfig(steps=2, storage="bfloat16"),
        update=c.UpdateConfig(updates_per_rollout=1, gradient_checkpointing=KEEP[options.keep]),
        data=c.DataConfig(prompts="prompts.txt"),
    )
    return METHODS[method](base)


def find(options: argparse.Namespace, config: c.TrainConfig) -> Architecture:
    """The architecture of a case."""
    found = find_architecture(config.model)
    if not options.small:
        return found
    known = PUBLISHED[PATHS[found.family].rsplit("/", 1)[-1]]
    known = replace(known, transformer=SMALL[found.family], vae=SMALL_VAE[found.family])
    return build_architecture(config.model, known, source="small")


def build(options: argparse.Namespace, config: c.TrainConfig, found: Architecture) -> Any:
    """The network, all of it, on the device."""
    spec = replace(config.model, family=found.family)
    torch.manual_seed(0)
    return random_model(
        found.family,
        spec,
        transformer=found.model.transformer.config,
        vae=found.model.pipe.vae.config,
        text_tokens=found.model.text_tokens,
        device=options.device,
    )


def random_network(name: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A network with random weights, as from_pretrained leaves it: in `dtype`, except modules that the class keeps in float32."""
    import diffusers

    kind, before = getattr(diffusers, name), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module = kind(**config)
    finally:
        torch.set_default_dtype(before)
    kept = kind._keep_in_fp32_modules or []
    for path, parameter in module.named_parameters():
        if any(part in kept for part in path.split(".")):
            parameter.data = parameter.data.float()
    return module.eval()


def random_model(
    family: str,
    spec: ModelSpec,
    *,
    transformer: Mapping[str, Any],
    vae: Mapping[str, Any],
    text_tokens: int,
    layers: int | None = None,
    device: str = "auto",
) -> FamilyModel:
    """A model with random weights, built from config.json files; `layers` blocks of each kind instead of all. Prompts encode to random inputs."""
    place, kind = choose_device(device), family_class(COMPONENTS[family][0])
    dtypes = load_dtypes(spec, place)
    fewer = {} if layers is None else dict.fromkeys(kind.traits.blocks.values(), layers)

    def build(name: str, config: Mapping[str, Any]) -> Any:
        with torch.random.fork_rng(devices=[]), place:
            return random_network(name, config, dtypes["vae" if name.startswith("Autoencoder") else "transformer"])

    with tempfile.TemporaryDirectory() as folder:
        Configs(family=family, transformer={**plain(transformer), **fewer}, vae=plain(vae)).write(Path(folder))
        model = assembled(kind, spec, Path(folder), build, place)
    shapes = {name: one.shape for name, one in model._trial_inputs(text_tokens).items() if name != "guidance"}

    def encode(prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        return {name: torch.randn(shape).to(place, DTYPES[spec.dtype]) for name, shape in shapes.items()}

    model._encode = encode  # type: ignore[method-assign]
    model.place("network", place)
    return model


def fitted(
    network: NetworkShape, job: RunShape, rates: Rates, *, forward: float, backward: float, decode: float
) -> dict[str, float]:
    """Ratios of measured to predicted seconds of one block's passes and of a decode."""
    one, rates = replace(network, blocks=1), replace(rates, launch=0.0, eager=0.0)
    factor = forward / forward_seconds(one, job, rates)
    plain = backward_seconds(one, replace(job, checkpointing=False), rates)
    again = backward_seconds(one, job, rates) - plain
    return {
        "forward": factor,
        "backward": max(0.1, (backward - factor * again) / plain),
        "decode": decode / decode_seconds(network, job, rates),
    }


def time_passes(model: Any) -> tuple[float, float]:
    """Seconds of a forward pass of one branch, and of a forward and a backward pass; the first calls warm up."""
    x, sigma = torch.randn(1, *model.latent_shape(), device=model.device), torch.tensor(0.7)
    conditions = model.encode(["a prompt"])

    def forward() -> None:
        with torch.no_grad():
            model.velocity(x, sigma, conditions, guidance=1.0)

    def both() -> None:
        v = model.velocity(x, sigma, conditions, guidance=1.0)
        v.backward(torch.ones_like(v))
        model.network.zero_grad(set_to_none=True)

    def clocked(run: Any) -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return min(clocked(forward) for _ in range(2)), clocked(both)


def iterate(model: Any, config: c.TrainConfig, said: Forecast) -> dict[str, float]:
    """One iteration by the trainer, as a later one of a run is: optimizer state is there, the VAE is in its place, the anchor is old."""
    reward = CompositeReward(config.rewards, device=model.device)
    prompts = [Prompt(f"a prompt {number}") for number in range(config.batch.prompts)]
    parts = Inputs(model=model, reward=reward, prompts=prompts)
    trainer = assemble(config, parts)
    trainer.state.optimizer.materialize()
    if trainer.state.anchor is not None:
        trainer.state.anchor.renewed_at = -1
    trainer.engine.vae.stays = said.phases[0].memory.visitor > 0
    if model.device.type == "cuda" and not trainer.engine.vae.stays:
        model.place("vae", "cpu")
        torch.cuda.empty_cache()
    trainer.encode_prompts()
    return trainer.step()


def compare(said: Forecast, row: dict[str, float]) -> dict[str, Any]:
    """Predicted and measured, phase by phase, and of the iteration."""
    result: dict[str, Any] = {}
    for phase in said.phases:
        result[phase.name] = {
            "seconds": [phase.seconds, row[f"time/{phase.name}"]],
            "gib": [phase.memory.total / GIB, row.get(f"time/peak_gib_{phase.name}", 0.0)],
            "parts": {name: size / GIB for name, size in vars(phase.memory).items()},
        }
    seconds = [sum(result[name]["seconds"][side] for name in PHASES) for side in (0, 1)]
    peaks = [max(result[name]["gib"][side] for name in PHASES) for side in (0, 1)]
    result["iteration"] = {"seconds": seconds, "gib": peaks}
    result["passes"] = {name: vars(passes) for name, passes in said.passes[0].items()}
    return result


def show(name: str, result: dict[str, Any]) -> None:
    """One line a phase."""
    for phase in (*PHASES, "iteration"):
        (s, s_real), (g, g_real) = result[phase]["seconds"], result[phase]["gib"]
        times, sizes = s / s_real if s_real else 0.0, g / g_real if g_real else 0.0
        print(
            f"{name:<28} {phase:<10} {s:8.2f} s predicted {s_real:8.2f} measured ({times:5.2f})   "
            f"{g:7.2f} GiB predicted {g_real:7.2f} measured ({sizes:5.2f})",
            flush=True,
        )


def case(
    options: argparse.Namespace,
    report: dict[str, Any],
    model: Any,
    found: Architecture,
    device: hardware.Hardware,
    length: int,
) -> bool:
    """One network at one length with every method; returns whether memory is within 10% and time within 20%."""
    forward, both = time_passes(model)
    network, fine = found.network, True
    assert network is not None
    for method in options.methods:
        config = configure(options, found.family, length, method)
        said = forecast(config, device, architecture=found)
        result = compare(said, iterate(model, config, said))
        clips = config.batch.prompts * config.batch.group_size
        result["fit"] = fitted(
            network,
            replace(said.job, guidance=False),
            device.rates,
            forward=forward / network.blocks,
            backward=(both - forward) / network.blocks,
            decode=result["decode"]["seconds"][1] / clips,
        )
        result["pass_seconds"] = {"forward": forward, "forward_and_backward": both}
        name = f"{found.family} {length} {method}"
        report["cases"][name] = result
        show(name, result)
        ratios = [a / b if b else 1.0 for a, b in result["iteration"].values()]
        fine = fine and abs(ratios[0] - 1) <= 0.2 and abs(ratios[1] - 1) <= 0.1
    return fine


def main() -> int:
    """Every case; exit status 1 when memory is off by more than 10% or time by more than 20%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the results as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--frames", type=int, nargs="*", default=None, help="81 and 33")
    parser.add_argument("--families", nargs="*", default=list(PATHS))
    parser.add_argument("--methods", nargs="*", default=["branch", "sage"])
    parser.add_argument("--compile", action="store_true", help="compiled blocks: add a minute a network")
    parser.add_argument("--keep", choices=KEEP, default="auto", help="what blocks keep for their backward pass")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    frames = options.frames or ([5, 9] if options.small else [33, 81])
    device = hardware.here() if options.device == "cuda" else hardware.cpu()
    report: dict[str, Any] = {"device": device.title, "torch": torch.__version__, "cases": {}}
    fine, begin = True, time.perf_counter()
    for family in options.families:
        model = None
        for length in frames:
            first = configure(options, family, length, options.methods[0])
            found = find(options, first)
            model = build(options, first, found) if model is None else model
            model.video = found.model.video  # the same network makes clips of any length
            model.keep(choose_activations(first, model, World()))
            fine = case(options, report, model, found, device, length) and fine
            report["seconds"] = time.perf_counter() - begin
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(report, indent=1))
        del model
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(f"{report['seconds']:.0f} s; {'within 10% and 20%' if fine else 'OUT OF TOLERANCE'}")
    return 0 if fine or options.small else 1


if __name__ == "__main__":
    raise SystemExit(main())
