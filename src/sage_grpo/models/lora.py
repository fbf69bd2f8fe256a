"""LoRA through peft: choosing modules, adding, saving and loading in diffusers' format."""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints import files
from sage_grpo.models.checkpoints.files import Header
from sage_grpo.models.spec import AdapterSpec, LoraSpec
from sage_grpo.utils.hub import pinned_folder
from sage_grpo.utils.json_schema import DocumentError, parse_json, shown
from sage_grpo.utils.pretrained import LORA_KEYS, lora_config_fault

FILE = "pytorch_lora_weights.safetensors"
ADAPTER = "default"
PREFIX = "transformer"
EXPERT_KEY = "sage_grpo_expert"
SECOND = "transformer_2"  # the component of the expert for low noise, and the subfolder of its LoRA beside the other's
STORED = ("F32", "BF16", "F16", "F64")  # accepted dtypes of stored LoRA weights, by safetensors' names
ELSEWHERE = "Give the folder that a run saved, or that diffusers' save_lora_weights wrote for this model."
Expert = Literal["high", "low"] | None  # one of Wan 2.2's two networks; None for models with one


def match_targets(
    network: nn.Module, targets: Sequence[str], blocks: Collection[str], dead: Collection[str] = ()
) -> list[str]:
    """Full names of the Linear modules that `targets` mean; `blocks` are the names of the lists of repeated blocks. A target is looked for inside the
    repeated blocks, so that "to_q" does not also hit the token refiner; a name that starts outside of them ("context_embedder.*.to_q") is matched in
    full. Modules whose weights are `dead` (without a gradient) are left out."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    inside = re.compile(rf"(?:{'|'.join(map(re.escape, blocks))})\.\d+\.(.+)")
    chosen: dict[str, None] = {}
    for target in targets:
        matches = []
        for name in linear:
            local = inside.fullmatch(name)
            hit = fnmatch.fnmatchcase(name, target)
            if local is not None:
                hit = hit or fnmatch.fnmatchcase(local[1], target) or fnmatch.fnmatchcase(local[1], f"*.{target}")
            if hit:
                matches.append(name)
        if not matches:
            locals_ = sorted({local[1] for name in linear if (local := inside.fullmatch(name))})
            close = difflib.get_close_matches(target, [*locals_, *linear], n=5, cutoff=0.3)
            raise ModelError(
                f'lora.targets: "{target}" binds to no Linear module of the network. '
                f"Close names: {', '.join(close) or 'none'}. Names inside a block: {', '.join(locals_)}."
            )
        chosen.update(dict.fromkeys(name for name in matches if f"{name}.weight" not in dead))
    if not chosen:
        raise ModelError(f"lora.targets {list(targets)} bind only to modules that never receive a gradient.")
    return list(chosen)


def _compute_in_input_dtype(network: nn.Module) -> None:
    """Let layers whose adapters are plain matrices compute with `adapted_linear`, weights in float32 or not. peft would compute adapters in float32
    instead: at video sizes a seventh of the time of a backward pass and half as many bytes again to keep for it, for digits that the sum with the
    base layer's bfloat16 output drops."""
    from peft.tuners.lora import Linear

    from sage_grpo.models.network.adapted import AdaptedLinear

    layer: Any
    for layer in network.modules():
        if type(layer) is not Linear or layer.lora_variant or type(layer.base_layer) is not nn.Linear:
            continue
        halves = [*layer.lora_A.values(), *layer.lora_B.values()]
        plain = all(type(half) is nn.Linear and half.bias is None for half in halves)
        if plain and all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values()):
            # By class: a function bound to each layer would make a compiler see another block in every block.
            layer.__class__ = AdaptedLinear


def add_lora(network: Any, lora: LoraSpec, names: list[str], expert: Expert = None, dead: Collection[str] = ()) -> None:
    """Add a trainable float32 adapter to the named modules; everything else is frozen. dead: parameters that nothing reads. A saved LoRA that it
    starts from may have adapters there, which are passed over."""
    from peft import LoraConfig

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha or lora.rank, target_modules=names)
    network.requires_grad_(False)
    device = next(network.parameters()).device
    # A network without storage gets an adapter without, whose first weights would take most of an export's time.
    with torch.random.fork_rng(devices=[]), device if device.type == "meta" else nullcontext():
        torch.manual_seed(lora.seed)
        network.add_adapter(config, adapter_name=ADAPTER)
    for name, parameter in network.named_parameters():
        if is_lora(name):
            parameter.data = parameter.data.to(torch.float32)
            parameter.requires_grad_(True)
    _compute_in_input_dtype(network)
    if lora.path is not None:
        folder = pinned_folder(lora.path, option="model.lora.path")
        folder = folder_of(folder, SECOND) if expert == "low" and has_both(folder) else folder
        _check_expert(read_header(folder), folder, expert)
        _start_from(network, folder, dead)


def folder_of(folder: str | Path, component: str) -> Path:
    return Path(folder) / SECOND if component == SECOND else Path(folder)


def has_both(folder: str | Path) -> bool:
    return (Path(folder) / SECOND / FILE).is_file()


def is_lora(name: str) -> bool:
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def _start_from(network: nn.Module, folder: Path, dead: Collection[str]) -> None:
    from safetensors.torch import load_file

    whole = {key.removeprefix(f"{PREFIX}."): tensor for key, tensor in load_file(_file(folder)).items()}
    _refuse_broken(whole, folder)
    saved = {key: tensor for key, tensor in whole.items() if f"{key.partition('.lora_')[0]}.weight" not in dead}
    parameters = {_plain(name): parameter for name, parameter in network.named_parameters() if is_lora(name)}
    wrong = {key for key in saved.keys() & parameters.keys() if saved[key].shape != parameters[key].shape}
    if saved.keys() != parameters.keys() or wrong:
        example = next(iter(sorted(wrong or (saved.keys() ^ parameters.keys()))))
        raise ModelError(
            f'lora.path "{folder}" holds another LoRA than lora.rank and lora.targets describe (first difference: '
            f"{example}). Use the rank and targets that it was trained with; its README.md names them."
        )
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(saved[key])


def save_lora(folder: Path, network: Any, weights: Mapping[str, Tensor], expert: Expert = None) -> None:
    """Write `weights` (by the network's parameter names) so that diffusers' load_lora_weights reads them. `expert` names the network among Wan 2.2's
    two; the file remembers it, because their adapters have equal shapes."""
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
    from diffusers.training_utils import _collate_lora_metadata

    layers = {
        f"{PREFIX}.{_plain(name)}": weights.get(name, parameter).detach().to("cpu").contiguous()
        for name, parameter in network.named_parameters()
        if is_lora(name)
    }
    # Without its configuration a loader would take alpha = rank.
    config = _collate_lora_metadata({PREFIX: network}).get(f"{PREFIX}_lora_adapter_metadata") or {}
    known = {key: value for key, value in config.items() if key in LORA_KEYS}  # others would be refused on reading
    packed = {f"{PREFIX}.{key}": sorted(value) if isinstance(value, set) else value for key, value in known.items()}
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(packed, indent=2, sort_keys=True)}
    if expert is not None:
        metadata[EXPERT_KEY] = expert
    files.write_weights(folder / FILE, layers, metadata)


def stored_weights(folder: Path, components: Sequence[str]) -> dict[str, Tensor]:
    """A saved LoRA by the names of the parameters that a model with these trained networks has."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for component in components:
        source, before = (folder_of(folder, component), f"{component}.") if len(components) > 1 else (folder, "")
        for key, tensor in load_file(_file(source)).items():
            layer, half = key.removeprefix(f"{PREFIX}.").split(".lora_")
            weights[f"{before}{layer}.lora_{half[0]}.{ADAPTER}.weight"] = tensor
    return weights


def load_lora(pipe: Any, folder: str | Path, *, component: str | None = None, adapter: str | None = None) -> None:
    """Load a saved LoRA into a stock diffusers pipeline; HunyuanVideo-1.5's have no `load_lora_weights`. `component` is the network that it belongs
    to, "transformer_2" for Wan 2.2's low-noise expert; None reads it from the file."""
    folder = pinned_folder(str(folder), option="LoRA")
    two = getattr(pipe, SECOND, None) is not None
    if two and component is None and has_both(folder):
        for name in ("transformer", SECOND):
            load_lora(pipe, folder_of(folder, name), component=name, adapter=adapter)
        return
    if component is None:
        component = SECOND if two and read_header(folder).metadata.get(EXPERT_KEY) == "low" else "transformer"
    expert: Expert = "low" if component == SECOND else "high"
    load_into(getattr(pipe, component), folder, adapter, expert=expert if two else None)


def load_into(network: Any, folder: str | Path, adapter: str | None = None, *, expert: Expert = None) -> None:
    folder = pinned_folder(str(folder), option="LoRA")
    header = read_header(folder)
    _check_expert(header, folder, expert)
    _check_fits(network, header, folder)
    with _refused_in_words(f'"{folder}"', ELSEWHERE):
        network.load_lora_adapter(str(folder), prefix=PREFIX, weight_name=FILE, adapter_name=adapter)
    _refuse_broken({name: tensor for name, tensor in network.named_parameters() if ".lora_" in name}, folder)
    network.train(network.training)  # peft's new layers are in training mode (dropout)
    _compute_in_input_dtype(network)


@contextmanager
def _refused_in_words(what: str, remedy: str = "") -> Iterator[None]:
    """A context in which errors of diffusers and peft, which do not check the file, name the LoRA."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        text = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{what} holds no LoRA of this model ({type(error).__name__}: {text}). {remedy}".strip()
        ) from error


def find_adapter(spec: AdapterSpec, *, experts: bool) -> Path:
    folder = pinned_folder(spec.path, option="model.adapters")
    if not (folder / spec.file).is_file():
        raise ModelError(f'model.adapters: there is no {spec.file} in "{spec.path}".')
    if experts != (spec.expert is not None):
        need = "expert: high or low, for the model has two" if experts else "no expert, for the model has one network"
        raise ModelError(f'model.adapters "{spec.path}" needs {need}.')
    _check_configuration(files.read_header(folder / spec.file), folder / spec.file)
    return folder


def fuse_adapter(pipe: Any, spec: AdapterSpec, folder: Path) -> None:
    """Add a frozen LoRA to the weights of a stock pipeline's network; it leaves no layers of its own behind."""
    network = pipe.transformer_2 if spec.expert == "low" else pipe.transformer
    options: dict[str, Any] = {"weight_name": spec.file, "adapter_name": "frozen"}
    with _refused_in_words(f'model.adapters: "{spec.path}" ({spec.file})'):
        if callable(getattr(pipe, "load_lora_weights", None)):
            second = {"load_into_transformer_2": True} if spec.expert == "low" else {}
            pipe.load_lora_weights(str(folder), local_files_only=True, **options, **second)
        else:  # HunyuanVideo-1.5's pipelines have no such method, and nothing is converted
            network.load_lora_adapter(str(folder), prefix=PREFIX, **options)
    layers = {name: tensor for name, tensor in network.named_parameters() if ".lora_" in name}
    if not layers:  # diffusers only warns
        raise ModelError(f'model.adapters: nothing in "{spec.path}" ({spec.file}) fits this model\'s layers.')
    _refuse_broken(layers, folder)
    network.fuse_lora(lora_scale=spec.scale, safe_fusing=True)
    network.unload_lora()


def read_header(folder: str | Path) -> Header:
    """The header of a saved LoRA of any origin; ModelError if it is damaged or holds no LoRA."""
    path = _file(Path(folder))
    header = files.read_header(path)
    strange = {key: dtype for key, dtype in header.dtypes.items() if dtype not in STORED}
    if not header.shapes:
        raise ModelError(f"{path} holds no tensor, so that it would change nothing. {ELSEWHERE}")
    if strange:
        key = sorted(strange)[0]
        raise ModelError(f"{path} holds {key} as {strange[key]}; a LoRA is stored as {', '.join(STORED)}. {ELSEWHERE}")
    return header


def _check_fits(network: nn.Module, header: Header, folder: Path) -> None:
    """Refuse a LoRA that diffusers would pass over in silence or fail on in the middle: by its names, shapes and configuration."""
    stored = {
        key.removeprefix(f"{PREFIX}."): shape for key, shape in header.shapes.items() if key.startswith(f"{PREFIX}.")
    }
    if not stored:
        first = sorted(header.shapes)[0]
        raise ModelError(
            f'"{folder}" holds no weights that begin with "{PREFIX}.", as diffusers names them (its first is {first}), so that it would '
            f"change nothing. {ELSEWHERE}"
        )
    weights = {name: module.weight.shape for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    modules = {name for name, _ in network.named_modules()}
    for key, shape in stored.items():
        half = re.fullmatch(r"(.+)\.lora_([AB])\.weight", key)
        if half is None:
            continue  # another layout, which diffusers converts or refuses
        name, side = half.groups()
        if name not in modules:
            raise ModelError(f'"{folder}" holds {key}, and the model has no layer {name}. {ELSEWHERE}')
        base = weights.get(name, weights.get(f"{name}.base_layer"))
        if base is not None:
            other = stored.get(f"{name}.lora_{'B' if side == 'A' else 'A'}.weight")
            rank = shape[0 if side == "A" else -1] if len(shape) == 2 else 0
            wanted = (rank, base[1]) if side == "A" else (base[0], rank)
            if other is None or rank < 1 or tuple(shape) != tuple(wanted):
                fault = "has no other half" if other is None else f"has the shape {list(shape)}, the layer {list(base)}"
                raise ModelError(f'"{folder}": {key} {fault}. {ELSEWHERE}')
    _check_configuration(header, folder / FILE)


def _check_configuration(header: Header, file: Path) -> None:
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY

    text = header.metadata.get(LORA_ADAPTER_METADATA_KEY)
    if text is None:
        return
    what = f"{file}: its configuration ({LORA_ADAPTER_METADATA_KEY})"
    largest = max((shape[0] for key, shape in header.shapes.items() if ".lora_A." in key and shape), default=math.inf)
    try:
        config = parse_json(text, what)
        if not isinstance(config, dict):
            raise DocumentError(f"{what} must be an object, got {shown(config)}.")
        parts: dict[str, dict[str, Any]] = {}  # by network
        for key, value in config.items():
            network, _, name = key.partition(".")
            parts.setdefault(network, {})[name or network] = value
        fault = next(filter(None, (lora_config_fault(part, largest) for part in parts.values())), None)
        if fault is None and any(
            end in key for key in header.shapes for end in (".lora_magnitude_vector", ".lora_B.bias")
        ):
            fault = "goes with weights of DoRA or with biases, which are not supported"
        if fault is not None:
            raise DocumentError(f"{what} {fault}.")
    except DocumentError as error:
        raise ModelError(f"{error} {ELSEWHERE}") from error


def _refuse_broken(tensors: Mapping[str, Tensor], folder: Path) -> None:
    if broken := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise ModelError(f'"{folder}": {broken[0]} holds NaN or infinity. Give another export or checkpoint.')


def _check_expert(header: Header, folder: Path, expert: Expert) -> None:
    saved = header.metadata.get(EXPERT_KEY)
    if saved is None or saved == expert:
        return
    if expert is None:
        raise ModelError(
            f'"{folder}" is a LoRA of the {saved}-noise expert of a model with two; this checkpoint has one network for all '
            "noise levels. Load the checkpoint that it was trained on (its README.md names it)."
        )
    where = SECOND if saved == "low" else "transformer"
    raise ModelError(
        f'"{folder}" is a LoRA of the {saved}-noise expert, but would be loaded into the {expert}-noise expert. Set '
        f'model.expert to "{saved}", or for a diffusers pipeline component="{where}".'
    )


@dataclass
class Merge:
    """The rounding of weights that a LoRA is folded into, over all layers: its update may be smaller than their last digit."""

    update: float = 0.0  # squared norm of the update
    along: float = 0.0
    """Inner product of update and change. The norm of the change would not do: where few weights move, each moves too far."""

    def add(self, update: Tensor, change: Tensor) -> None:
        self.update += float(update.square().sum(dtype=torch.float64))
        self.along += float((update * change).sum(dtype=torch.float64))

    @property
    def share(self) -> float:
        """Share of the update that the change keeps; 1 for no update."""
        return self.along / self.update if self.update else 1.0


def merged_weights(network: nn.Module, weights: Mapping[str, Tensor], merge: Merge) -> dict[str, Tensor]:
    """The network's plain weights with its active adapters folded in, under their plain names; `merge` measures the rounding. `weights` replaces
    parameters by name; it holds all of them where the network itself is sharded."""
    from peft.tuners.lora import LoraLayer

    tensors = {name: weights.get(name, tensor) for name, tensor in network.state_dict().items()}
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for name, module in network.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        base = state[f"{name}.weight"]
        merged = start = base.detach().float()
        update = torch.zeros_like(start)
        for adapter in module.active_adapters:
            up, down = (tensors[f"{name}.lora_{side}.{adapter}.weight"].detach().float() for side in "BA")
            part = module.scaling[adapter] * (up @ down).to(merged.device)
            merged, update = merged + part, update + part
        state[f"{name}.weight"] = merged.to(base.dtype)
        merge.add(update, state[f"{name}.weight"].float() - start)
    return state


def _plain(name: str) -> str:
    return name.replace(f".{ADAPTER}.", ".")


def _file(folder: Path) -> Path:
    file = folder / FILE
    if not file.is_file():
        raise ModelError(f'"{folder}" holds no LoRA: there is no {FILE} in it. Give the folder that a run saved.')
    return file
