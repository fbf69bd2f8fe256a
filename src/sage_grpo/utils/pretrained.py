"""Loading of pretrained files by diffusers and transformers, and checks of them that models and rewards share.

The libraries fill what is missing: weights with random values, a tokenizer with an empty vocabulary. And they obey the configuration: fetch
a kernel, which is code, from the hub, take another model as the base of an adapter, or make ten million layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_grpo.utils.json_schema import DocumentError, is_number, read_object, shown

ADAPTER_CONFIG = "adapter_config.json"
"""A file beside a model's weights that makes transformers add an adapter through peft, without a request."""
MOST_ALPHA = 1e6
"""Largest scale of a LoRA's update before it is divided by the rank; published ones have up to some thousands."""
LORA_KEYS: Mapping[str, Sequence[Any] | None] = {
    **dict.fromkeys(("r", "lora_alpha", "rank_pattern", "alpha_pattern")),
    "use_rslora": (False, True),
    # The names of the weights give the adapted layers.
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")),
    # For training and for people.
    **dict.fromkeys(("lora_dropout", "inference_mode", "qalora_group_size", "peft_version")),
    **dict.fromkeys(("base_model_name_or_path", "revision", "task_type", "auto_mapping")),
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "megatron_core": (None, "megatron.core"),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base's weights
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "ensure_weight_tying"), (False,)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "trainable_token_indices"), (None, [], {})),
    **dict.fromkeys(("megatron_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config"), (None, {})),
    **dict.fromkeys(("velora_config", "monteclora_config", "arrow_config", "kasa_config", "use_bdlora"), (None, {})),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), (None, [])),
}
"""Keys that peft writes of a LoRA, and their accepted values; None is any. By some of the others peft imports modules and changes networks."""

SLOW = re.compile(r"[*+?{].*[*+?{]|\)[*+?{]")
"""Regular expressions with nested or several repeats, whose matching may take exponential time."""
LEAST_COVERAGE = 0.75
"""Least share of its model's embeddings that a tokenizer knows; real ones know 99% (rows are padded to round numbers)."""
MOST_LAYERS = 10_000
"""Largest number of layers or steps: a hundred times the layers of published networks, ten times the steps of their schedulers."""
HARMLESS = {"_attn_implementation": ("eager", "sdpa"), "_experts_implementation": ("eager", "grouped_mm", "batched_mm")}
"""Implementations in PyTorch itself; transformers may fetch others ("flash_attention_2") as kernels from the hub."""


def from_pretrained(kind: Any, source: str | Path | None, **options: Any) -> Any:
    """`kind.from_pretrained(source, **options)` of diffusers or transformers, the only call of it: it fetches nothing but numbers, whatever the
    configuration asks for. `source` is None where the weights are among the options."""
    where = {name: options[name] for name in ("local_files_only", "subfolder") if name in options}
    if source is not None and (hasattr(kind, "config_class") or "config" in options):  # a class of transformers
        from transformers.utils import find_adapter_config_file

        if adapter := find_adapter_config_file(source, **where):
            raise DocumentError(
                f"{adapter} makes an adapter of the model beside it, whose base and code it names. Give a folder of plain weights, without that file."
            )
        if "config" not in options:
            options["config"] = load_config(kind.config_class, source, **where)
    elif source is not None:
        _read_config(Path(source, options.get("subfolder", ""), "config.json"))
    return kind.from_pretrained(source, **options)


def load_config(kind: Any, source: str | Path, **where: Any) -> Any:
    """The configuration of a transformers model, by its class or AutoConfig; the attention's implementation is chosen here, not there."""
    from transformers import PreTrainedConfig

    _read_config(Path(source, "config.json"))
    values, _ = PreTrainedConfig.get_config_dict(source, **where)
    check_config(values, f'config.json of "{source}"')
    config = from_pretrained(kind, source, trust_remote_code=False, **where)
    for one in _nested(config):
        for name, harmless in HARMLESS.items():
            if getattr(one, name) not in (None, *harmless):
                setattr(one, f"{name}_internal", None)  # the library's choice: sdpa where the model has it, else eager
    return config


def _read_config(file: Path) -> None:
    if file.exists():
        check_config(read_object(file), str(file))


def check_config(values: Mapping[str, Any], what: str) -> None:
    """Refuse a component's configuration with kernels of the hub, quantized weights or an impossible number of layers (or steps)."""
    for name, value in _entries(values):
        if name.strip("_").removesuffix("_internal") in ("attn_implementation", "experts_implementation"):
            if any("/" in str(one) for one in (value.values() if isinstance(value, dict) else [value])):
                raise DocumentError(
                    f"{what}: {name} is {shown(value)}, code that would be fetched from the hub. Take the entry out; sdpa or eager is used."
                )
        elif name == "quantization_config" and value:
            raise DocumentError(
                f"{what}: quantization_config is {shown(value)}. Quantized weights are not read: their code comes from other packages and the hub. "
                "Give the plain ones."
            )
        elif re.search(r"layers|depth|blocks|train_timesteps", name):
            counts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int | float)]
            if any(not one <= MOST_LAYERS for one in counts):
                owner = "schedulers" if "timesteps" in name else "networks"
                raise DocumentError(f"{what}: {name} is {shown(value)}; {owner} have at most {MOST_LAYERS:,}.")


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        yield from values.items()
    for one in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _entries(one)


def _nested(config: Any) -> Iterator[Any]:
    yield config
    for one in vars(config).values():
        if hasattr(one, "_attn_implementation_internal"):
            yield from _nested(one)


def weights_fault(
    missing: Iterable[str] = (), unexpected: Iterable[str] = (), mismatched: Iterable[Any] = ()
) -> str | None:
    other = [item if isinstance(item, str) else item[0] for item in mismatched]
    parts = []
    for verb, keys in (("lacks", missing), ("also holds", unexpected), ("holds in another shape", other)):
        if names := sorted(keys):
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"{verb} {', '.join(names[:5])}{more}")
    return "; it ".join(parts) or None


def loading_fault(info: Mapping[str, Any]) -> str | None:
    return weights_fault(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])


def tokenizer_files_fault(names: Mapping[str, str], folder: str | Path) -> str | None:
    """The files that a local tokenizer folder lacks, as a sentence, or None.

    `names` is the class's `vocab_files_names`: one whole file, or all the others (a vocabulary and its merges).
    """
    local, parts = Path(folder), dict(names)
    whole = parts.pop("tokenizer_file", "tokenizer.json")
    absent = [name for name in parts.values() if not (local / name).is_file()]
    if not local.is_dir() or (local / whole).is_file() or not absent:
        return None
    needed = " and ".join(parts.values())
    return (
        f'the tokenizer in "{folder}" needs {whole}, or {needed}, and there is no {" and no ".join([whole, *absent])}'
    )


def vocabulary_fault(tokenizer: Any, folder: str | Path, rows: int) -> str | None:
    vocabulary = tokenizer.get_vocab()
    size = max(vocabulary.values(), default=-1) + 1
    if size > rows:
        return (
            f'the tokenizer in "{folder}" knows {size} tokens, but its model has {rows} embeddings: they do not belong '
            "together"
        )
    if len(vocabulary) < LEAST_COVERAGE * rows:
        return (
            f'the tokenizer in "{folder}" knows {len(vocabulary)} tokens, but its model has {rows} embeddings: its files '
            f"({', '.join(tokenizer.vocab_files_names.values()) or 'added_tokens.json'}) are missing or another model's"
        )
    return None


def lora_config_fault(config: Mapping[str, Any], largest: float = math.inf) -> str | None:
    """The reason why a LoRA's configuration, in peft's names, cannot be used, or None; its weights have ranks up to `largest`."""
    for key, value in config.items():
        if key not in LORA_KEYS:
            return f'has the key "{key}", which is none of peft\'s for a LoRA'
        taken = LORA_KEYS[key]
        if taken is not None and value not in taken:
            return f'has {shown(value)} as "{key}", and only {" or ".join(map(shown, taken))} is supported'
        numbers: Iterable[Any] = [value] if key in ("r", "lora_alpha") else []
        if key in ("rank_pattern", "alpha_pattern"):
            numbers = value.values() if isinstance(value, dict) else [value]
            slow = [one for one in value if SLOW.search(one)] if isinstance(value, dict) else []
            if slow:
                return f'has the pattern {shown(slow[0])} in "{key}", which may take for ever: name the layers'
        most = largest if key in ("r", "rank_pattern") else MOST_ALPHA
        for number in numbers:
            if not is_number(number) or not 0 < number <= most:
                limit = "" if most == math.inf else f" and at most {most:g}"
                return f'has {shown(number)} in "{key}", which must be a number above 0{limit}'
    return None


def embedding_rows(config: Path) -> int | None:
    values = read_object(config)
    inner = values.get("text_config")
    rows = values.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int)):
        raise DocumentError(f"{config}: vocab_size must be a whole number, got {shown(rows)}.")
    return rows
