"""Export a run's checkpoint as weights for diffusers: a LoRA, a merged model or full weights, with a model card.

`sage-grpo export SOURCE --base DIFFUSERS_CHECKPOINT --out FOLDER` converts HunyuanVideo-1.5 weights of the original layout to diffusers;
`--to original` converts a diffusers transformer to the original names.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from sage_grpo.config.ranges import Folder, Natural, checked


@checked
class Options:
    """The checkpoint to export, or weights to convert, and the format."""

    run: str = ""
    """Folder of a run."""
    source: str = ""
    """Instead of run: a .safetensors file or folder to convert; with to original, a diffusers folder or hub id."""
    to: Literal["diffusers", "original"] = "diffusers"
    """With source: the layout to write."""
    base: str = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    """With source: the diffusers checkpoint that provides VAE, text encoders and configuration; a folder or hub id."""
    checkpoint: Natural | None = None
    """Iteration of the checkpoint; None is the newest good one."""
    weights: Literal["best"] | None = None
    """best exports the weights of the best evaluation in place of a checkpoint's."""
    ema: bool | None = None
    """Export the moving average of the weights; None does so where the run keeps one."""
    merged: bool = False
    """Merge the LoRA into the base model and write the whole model; in bfloat16 this rounds small updates away."""
    format: Literal["diffusers", "comfy", "kohya", "lightx2v", "peft"] = "diffusers"
    """Names in a LoRA's file: diffusers', or those of ComfyUI, kohya's programs, LightX2V or peft."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the weights. None is the model's for whole models, float32 for a LoRA, the source's for source."""
    out: Folder = "export"
    """Folder to write; with source it must not exist."""
    trust_run: bool = False
    """Also load Python code that the run's config.yaml names (a custom model family), with all your rights."""

    def __post_init__(self) -> None:
        default = {field.name: field.default for field in fields(self)}
        other = OF_A_RUN if self.source else OF_A_SOURCE
        given = [f"--{name}" for name in other if getattr(self, name) != default[name]]
        if given and self.source:
            raise ValueError(
                f"SOURCE is converted, not exported from a run: leave out {', '.join(given)}, or the source."
            )
        if given:
            raise ValueError(
                f"{', '.join(given)} needs weights to convert: sage-grpo export FILE_OR_FOLDER --out FOLDER."
            )


OF_A_RUN = ("run", "checkpoint", "weights", "ema", "merged", "format", "trust_run")
OF_A_SOURCE = ("to", "base")


def run(options: Options) -> int:
    return _convert(options) if options.source else _export(options)


def _convert(options: Options) -> int:
    out, source = Path(options.out), Path(options.source).expanduser()
    if (source / "config.yaml").is_file():
        raise ValueError(f"{source} is the folder of a run: sage-grpo export --run {source}.")
    if options.to == "diffusers" and not source.exists():  # before the base is asked for at the hub
        raise FileNotFoundError(f"There is no file or folder {options.source} to convert.")
    if out.exists():
        raise ValueError(f"{out} exists already: choose another --out, or remove it.")
    import torch

    from sage_grpo.tools.convert import diffusers_to_original, original_to_diffusers

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.to == "diffusers":
        count = original_to_diffusers(source, options.base, out, dtype)
        print(
            f"Wrote {out}: a diffusers checkpoint with {count} tensors of {options.source}. Use it as --model.path {out}."
        )
        return 0
    count = diffusers_to_original(options.source, out, dtype)
    print(f"Wrote {out}: {count} tensors under the original names. Its config.json is that of the authors' release.")
    return 0


def _export(options: Options) -> int:
    from sage_grpo.models.base import abilities
    from sage_grpo.models.checkpoints.from_configs import adapter_alone
    from sage_grpo.models.checkpoints.lora_names import TITLES, save_lora_for
    from sage_grpo.models.lora import stored_weights
    from sage_grpo.run.saved import Choice, find_checkpoint, read_config, refuse_own
    from sage_grpo.training.state import has_ema, load_weights

    config = read_config(Path(options.run), trust=options.trust_run, rewards=False)
    refuse_own(Path(options.out), Path(options.run))
    if options.weights is None:
        folder, exported = find_checkpoint(Path(options.run), options.checkpoint), False
    else:
        choice = Choice(run=options.run, weights=options.weights, checkpoint=options.checkpoint, ema=options.ema)
        found = choice.find(config.model)
        folder, exported = found.checkpoint or Path(options.run) / options.weights, found.exported
    spec = config.model if options.dtype is None else replace(config.model, dtype=options.dtype)
    whole = options.merged or spec.lora is None
    if options.format != "diffusers" and (whole or spec.own_family is not None):
        why = "--merged folds it into the model" if options.merged else f"{options.run} trained all weights"
        why = why if whole else f"no program knows the layers of {spec.own_family}"
        raise ValueError(f"--format {options.format} writes a LoRA, but {why}: leave --format out.")
    if whole and exported:
        raise ValueError(
            f"These weights exist only in {folder}, as the run exported them: use that folder, or leave --merged out."
        )
    spec.check_named()
    model: Any = spec.load() if whole or spec.own_family is not None else adapter_alone(spec)
    ema = not exported and (has_ema(folder) if options.ema is None else options.ema)
    weights = stored_weights(folder, model.experts.components) if exported else load_weights(folder, model, ema=ema)
    if options.dtype == "bfloat16" and not whole:
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    if options.format != "diffusers":
        for file in save_lora_for(options.format, Path(options.out), model, weights):
            print(f"Wrote {file} from {folder}{' (EMA)' if ema else ''}, for {TITLES[options.format]}.")
        return 0
    model.save(options.out, weights=weights, merged=options.merged)
    print(f"Wrote {options.out} from {folder}{' (EMA)' if ema else ''}.")
    merged = abilities(model).choices.get("merged")
    if merged is not None:
        print(merged)
    return 0
