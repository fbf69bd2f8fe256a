"""Write a checkpoint of a run as weights that load into diffusers: a LoRA, a merged model or full weights, with a model card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sage_grpo.config.ranges import Folder, Natural, checked

if TYPE_CHECKING:
    from sage_grpo.training.config import TrainConfig


@checked
class Options:
    """What to export."""

    run: str = ""
    """Folder of a run."""
    checkpoint: Natural | None = None
    """Iteration of the checkpoint; None is the newest good one."""
    ema: bool = False
    """Take the moving average of the weights."""
    merged: bool = False
    """Fold a LoRA into the base model and write the whole model. Prefer the LoRA where it can be loaded: merging rounds small updates away
    (the command says how much of them) unless `dtype` is float32."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What to store weights in. None: the run's `model.dtype` for a whole model, float32 for a LoRA. Modules that the family
    keeps in float32 (Wan's norms and time embedding) stay so."""
    out: Folder = "export"
    """Folder to write."""
    push_to: str = ""
    """OWNER/NAME of a repository on the Hugging Face hub that gets the export, with a card of metrics, recipe and held-out clips. Every file is listed
    first. The login is the hub's own (`hf auth login`, or the variable HF_TOKEN)."""
    public: bool = False
    """Make the repository public; without it a new one is private, and a public one that exists is refused."""
    dry_run: bool = False
    """With `push_to`: write the export and list what would be sent, and send nothing."""
    trust_run: bool = False
    """Also load Python code that the run's config.yaml names (a model family of somebody's own). It runs with all your rights."""


def run(options: Options) -> int:
    """Export."""
    from sage_grpo.models.base import Explains
    from sage_grpo.models.checkpoints.export import check_space
    from sage_grpo.models.checkpoints.from_configs import adapter_alone
    from sage_grpo.run.saved import find_checkpoint, read_config, refuse_own
    from sage_grpo.training.state import load_weights

    _check_push(options)
    config = read_config(Path(options.run), trust=options.trust_run, rewards=False)
    refuse_own(Path(options.out), Path(options.run))
    folder = find_checkpoint(Path(options.run), options.checkpoint)
    spec = config.model if options.dtype is None else replace(config.model, dtype=options.dtype)
    whole = options.merged or spec.lora is None
    spec.check_named()
    if spec.own_family is None and whole:
        print(check_space(spec, Path(options.out)))
    model = spec.load() if whole or spec.own_family is not None else adapter_alone(spec)
    weights = load_weights(folder, model, ema=options.ema)
    if options.dtype == "bfloat16" and not whole:
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    model.save(options.out, weights=weights, merged=options.merged)
    print(f"Wrote {options.out} from {folder}{' (EMA)' if options.ema else ''}.")
    if isinstance(model, Explains) and "merged" in model.choices:
        print(model.choices["merged"])
    if options.push_to:
        _push(options, config, int(folder.name))
    return 0


def _check_push(options: Options) -> None:
    """Before the model is loaded."""
    from sage_grpo.utils.hub import check_name, check_upload, uploads

    if not options.push_to:
        if options.public or options.dry_run:
            raise ValueError("--public and --dry_run are about --push_to OWNER/NAME, which is not given.")
        return
    (check_name if options.dry_run else check_upload)(options.push_to)
    if Path(options.out).is_dir():
        uploads(Path(options.out))  # what lies there already would be sent too


def _push(options: Options, config: TrainConfig, iteration: int) -> None:
    from sage_grpo.run.card import complete
    from sage_grpo.utils.hub import table, upload, uploads

    out = Path(options.out)
    complete(out, Path(options.run), config, iteration)
    files = uploads(out)
    kind = "public" if options.public else "private"
    print(
        f"{'Would send' if options.dry_run else 'Sending'} to the {kind} repository {options.push_to}:\n{table(files)}"
    )
    if not options.dry_run:
        message = f"sage-grpo: iteration {iteration}"
        print(f"Sent: {upload(out, options.push_to, files, private=not options.public, message=message)}")
