"""Finding and reading checkpoint folders. Only safetensors, never remote code."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.files import (
    LIBRARIES,
    STEMS,
    check_index,
    check_lengths,
    check_shards,
    read_if_there,
    read_json,
    stored_shapes,
)
from sage_grpo.utils.hub import failures, hub_name
from sage_grpo.utils.json_schema import DocumentError, demand
from sage_grpo.utils.pretrained import (
    check_config,
    embedding_rows,
    from_pretrained,
    loading_fault,
    tokenizer_files_fault,
    vocabulary_fault,
    weights_fault,
)
from sage_grpo.utils.suggest import nearest

if TYPE_CHECKING:
    import torch

PIPELINES: Mapping[str, str] = {
    "HunyuanVideo15Pipeline": "hunyuan15",
    "HunyuanVideo15ImageToVideoPipeline": "hunyuan15",
    "WanPipeline": "wan",
    "WanImageToVideoPipeline": "wan",
    "LTXPipeline": "ltx",
    "LTXImageToVideoPipeline": "ltx",
    "LTX2Pipeline": "ltx2",
    "LTX2ImageToVideoPipeline": "ltx2",
    "FluxPipeline": "flux",
    "Flux2KleinPipeline": "flux2",
    "StableDiffusion3Pipeline": "sd3",
    "QwenImagePipeline": "qwen_image",
    "QwenImageEditPipeline": "qwen_image_edit",
    "ZImagePipeline": "z_image",
}
"""Families by diffusers pipeline."""
TOKENIZERS = {f"tokenizer{number}": f"text_encoder{number}" for number in ("", "_2", "_3")}
"""Text encoders by tokenizer."""


class Located(Protocol):
    """A ModelSpec's place of the checkpoint."""

    @property
    def path(self) -> str | None: ...

    @property
    def revision(self) -> str | None: ...


def resolve(spec: Located) -> Path:
    if spec.path is None or spec.path == "shapes":
        folder = Path(str(files("sage_grpo") / "worlds" / "shapes" / "assets"))
        if not (folder / "model_index.json").is_file():
            raise ModelError(
                "The small checkpoint of the package is not installed (sage_grpo/worlds/shapes/assets has no "
                "model_index.json). Install the released package, or give model.path: a diffusers folder or a hub id."
            )
        return folder
    folder = Path(spec.path).expanduser()
    if folder.is_dir() and spec.revision is not None:
        raise ModelError(
            f'model.path "{spec.path}" is a folder here, which has no revisions, but model.revision is "{spec.revision}": leave the '
            "revision out, or give a hub id."
        )
    if folder.is_dir():
        return folder
    if hub_name(spec.path):
        return _download(spec)
    if not folder.parent.is_dir():
        raise ModelError(f'model.path "{spec.path}" is not a folder. Nor does its parent "{folder.parent}" exist.')
    near = nearest(folder.name, [child.name for child in folder.parent.iterdir() if child.is_dir()])
    hint = f' Did you mean "{folder.parent / near}"?' if near else ""
    raise ModelError(f'model.path "{spec.path}" is not a folder.{hint}')


def local_folder(spec: Located) -> Path | None:
    """The checkpoint's folder with at least its config files, if it is here: as a path, or in the hub's cache."""
    if spec.path is None or Path(spec.path).expanduser().is_dir() or not hub_name(spec.path):
        return resolve(spec)
    from huggingface_hub import try_to_load_from_cache

    names = ("model_index.json", "transformer/config.json")
    index, config = (try_to_load_from_cache(spec.path, name, revision=spec.revision) for name in names)
    return Path(index).parent if isinstance(index, str) and isinstance(config, str) else None


def configs_folder(spec: Located) -> Path:
    return local_folder(spec) or _download(spec, weights=False)


def _download(spec: Located, *, weights: bool = True) -> Path:
    from diffusers import DiffusionPipeline
    from huggingface_hub import snapshot_download

    try:
        if not weights:
            return Path(snapshot_download(str(spec.path), revision=spec.revision, allow_patterns=["*.json"]))
        return Path(DiffusionPipeline.download(spec.path, revision=spec.revision, use_safetensors=True))
    except failures() as error:
        raise ModelError(
            f'model.path "{spec.path}" is neither a folder here nor could it be fetched from the hub '
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}). Check the spelling, "
            "model.revision, the network and your hub login, or give the path of a local diffusers folder."
        ) from error


def read_index(folder: Path) -> dict[str, Any]:
    file, hint = folder / "model_index.json", ""
    if not file.is_file():
        if (folder / "config.json").is_file():
            hint = " It looks like one component of a pipeline: give its parent folder."
        raise ModelError(
            f'"{folder}" is not a diffusers checkpoint: it has no model_index.json.{hint} '
            "A checkpoint is what `pipeline.save_pretrained(folder)` writes."
        )
    index = read_json(file)
    check_index(file, index)
    check_shards(folder)
    return index


def read_config(folder: Path, component: str, name: str = "config.json") -> dict[str, Any]:
    file = folder / component / name
    values = read_if_there(file)
    with in_words(folder, component):
        check_config(values, str(file))
    return values


def detect_family(spec: Located) -> str:
    folder = resolve(spec)
    name = str(read_index(folder).get("_class_name"))
    if name not in PIPELINES:
        raise ModelError(
            f'"{folder}" holds a {name}; supported are {", ".join(PIPELINES)}. For another model write a family '
            "(docs/extending.md) and name its module in model.family."
        )
    return PIPELINES[name]


def has_component(index: Mapping[str, Any], name: str) -> bool:
    """True if a checkpoint has a component; an optional one may be missing, or listed as [null, null]."""
    entry = index.get(name)
    return isinstance(entry, list) and entry[0] is not None


def left_out(pipeline: Any, index: Mapping[str, Any]) -> list[str]:
    """Components that a pipeline's constructor asks for and a checkpoint does not have: SD3's third encoder, for one."""
    parameters = list(inspect.signature(pipeline.__init__).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and not has_component(index, p.name)]


def check_components(folder: Path, index: Mapping[str, Any], names: Iterable[str], weights: Iterable[str]) -> None:
    for name in names:
        listed = has_component(index, name)
        if not listed or not (folder / name).is_dir():
            what = "model_index.json does not list it" if not listed else f"there is no folder {folder / name}"
            raise ModelError(
                f'The checkpoint "{folder}" lacks its component "{name}" ({what}). Download it again in full, or save the '
                "whole pipeline with save_pretrained."
            )
    for name in weights:
        if not list((folder / name).glob("*.safetensors")):
            present = ", ".join(sorted(file.name for file in (folder / name).iterdir())) or "nothing"
            raise ModelError(
                f'Component "{name}" of "{folder}" has no .safetensors file (found: {present}). Pickled weights are never '
                "loaded: convert them with `save_pretrained(folder, safe_serialization=True)`."
            )


def check_folder(folder: Path) -> None:
    index = read_index(folder)
    check_lengths(folder)
    parts = [name for name in index if has_component(index, name)]
    networks = [name for name in parts if name not in TOKENIZERS and (folder / name / "config.json").is_file()]
    check_components(folder, index, parts, networks)
    with _quiet(folder):
        _check_tokenizer_files(folder)
        _check_weights(folder, ())


def load_pipeline(pipeline: Any, folder: Path, *, skip: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> Any:
    """The stock pipeline without its encoders, which load when a prompt is not in the cache; their files must be whole already now. A component that
    the checkpoint leaves out is handed over as None: diffusers asks that of its callers."""
    check_lengths(folder)
    left = [*skip, *left_out(pipeline, read_index(folder))]
    with _quiet(folder), in_words(folder, "model_index.json"):
        _check_tokenizer_files(folder)
        _check_weights(folder, skip, loading=True)
        pipe = from_pretrained(
            pipeline, folder, dtype=dict(dtypes), use_safetensors=True, local_files_only=True, **dict.fromkeys(left)
        )
    for name, encoder in TOKENIZERS.items():
        config = folder / encoder / "config.json"
        with in_words(folder, encoder):
            rows = embedding_rows(config) if config.is_file() else None
        if rows is not None and getattr(pipe, name, None) is not None:
            _refuse(folder, name, vocabulary_fault(getattr(pipe, name), folder / name, rows))
    return pipe


def _check_tokenizer_files(folder: Path) -> None:
    index = read_index(folder)
    for name in TOKENIZERS:
        if has_component(index, name):
            files = getattr(component_class(folder, index, name), "vocab_files_names", None)
            if files is None:
                raise ModelError(f'The {name} of "{folder}" is a {index[name][1]}, which is not a tokenizer.')
            _refuse(folder, name, tokenizer_files_fault(files, folder / name))


def _check_weights(folder: Path, skip: Sequence[str], *, loading: bool = False) -> None:
    """Compare names and shapes in the headers of the networks' files with the classes', before anything is read. `loading` refuses a transformers
    model among the components that diffusers loads by itself: encoders load on demand."""
    import diffusers
    import torch
    from transformers import PreTrainedModel

    index = read_index(folder)
    for name in (name for name in index if has_component(index, name) and name not in skip):
        kind = component_class(folder, index, name)
        if loading and issubclass(kind, PreTrainedModel):
            raise ModelError(
                f'"{folder}" names a {index[name][1]} as its {name}: only its text and image encoders may be models of transformers. '
                "Save the pipeline again with save_pretrained."
            )
        if not issubclass(kind, diffusers.ModelMixin):
            continue
        if not (folder / name / "config.json").is_file():
            _refuse(folder, name, "lacks config.json")
        held, config = stored_shapes(folder / name), read_config(folder, name)
        with in_words(folder, name), _no_larger_than(folder, name, held), torch.device("meta"):
            expected = {key: tuple(value.shape) for key, value in kind.from_config(config).state_dict().items()}
        ignored = kind._keys_to_ignore_on_load_unexpected or []
        unexpected = [key for key in held.keys() - expected.keys() if not any(re.search(text, key) for text in ignored)]
        mismatched = [key for key in held.keys() & expected.keys() if held[key] != expected[key]]
        _refuse(folder, name, weights_fault(expected.keys() - held.keys(), unexpected, mismatched))


@contextmanager
def _no_larger_than(folder: Path, name: str, held: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """A context in which building a network fails when it gets far larger than its files, before memory is taken for it. A tensor is registered when
    it is made and when its weights are put in, and there are tables that no file holds."""
    from torch.nn.modules.module import (
        register_module_buffer_registration_hook,
        register_module_parameter_registration_hook,
    )

    tensors, values = 4 * len(held) + 1000, 4 * sum(map(math.prod, held.values())) + (1 << 26)

    def count(module: object, label: str, tensor: torch.Tensor | None) -> None:
        nonlocal tensors, values
        if tensor is not None:
            tensors, values = tensors - 1, values - tensor.numel()
            if min(tensors, values) < 0:
                _refuse(folder, name, "has a config.json that describes a far larger network than its weights")

    with register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count):
        yield


@contextmanager
def in_words(folder: Path, name: str) -> Iterator[None]:
    """A context in which the libraries' errors about unexpected files become a ModelError that names the component."""
    try:
        yield
    except DocumentError as error:
        raise ModelError(str(error)) from error
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise ModelError(
            f'"{name}" of "{folder}" cannot be used ({type(error).__name__}: {text}). Its files are damaged or do not fit the installed '
            "libraries: download it again in full, or save the whole pipeline with save_pretrained."
        ) from error


def component_class(folder: Path, index: Mapping[str, Any], name: str) -> Any:
    """The class of a component: a network, a scheduler, a guider, a tokenizer or a processor. A pipeline would follow the model_index.json in
    the component's own folder."""
    import diffusers
    import transformers
    from diffusers.guiders.guider_utils import BaseGuidance
    from transformers.feature_extraction_utils import FeatureExtractionMixin
    from transformers.image_processing_base import ImageProcessingMixin

    library, class_name = index[name]
    allowed: tuple[type, ...] = (diffusers.ModelMixin, diffusers.SchedulerMixin, BaseGuidance)
    if library == "transformers":
        allowed = (transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin)
        allowed += (ImageProcessingMixin, FeatureExtractionMixin)
    kind: Any = getattr(import_module(LIBRARIES[library]), class_name, None)
    if kind is None:
        package = import_module(LIBRARIES[library].partition(".")[0])
        raise ModelError(
            f'"{folder}" names a {class_name} as its {name}, which {package.__name__} {package.__version__} does not have: the checkpoint is for a '
            f"newer version, or for code of its authors. Install a {package.__name__} that has it, or use another checkpoint."
        )
    if not (isinstance(kind, type) and issubclass(kind, allowed)):
        fault = (
            "which is not part of a pipeline: only models, schedulers, guiders, tokenizers and processors are loaded"
        )
        lacking = getattr(
            kind, "_backends", None
        )  # of the libraries' placeholder for a class whose packages are not here
        if isinstance(lacking, list):
            fault = f"which needs packages that are not installed: pip install {' '.join(lacking)}"
        raise ModelError(f'"{folder}" names a {class_name} as its {name}, {fault}. Or download the checkpoint again.')
    return kind


def _refuse(folder: Path, name: str, fault: str | None) -> None:
    if fault is None:
        return
    subject = "" if fault.startswith("the ") else "it "
    raise ModelError(
        f'Component "{name}" of "{folder}" cannot be used: {subject}{fault}. Download it again in full, or save the whole '
        "pipeline with save_pretrained."
    )


@contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Silence the libraries' notices while loading, and their progress bars where loading takes no time."""
    import diffusers
    import transformers

    small = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 1 << 30
    logs = [(log, log.get_verbosity()) for log in (diffusers.utils.logging, transformers.utils.logging)]
    for log, _ in logs:
        log.set_verbosity_error()
        if small:
            log.disable_progress_bar()
    try:
        yield
    finally:
        for log, verbosity in logs:
            log.set_verbosity(verbosity)
            if small:
                log.enable_progress_bar()


def load_component(folder: Path, index: Mapping[str, Any], name: str, dtype: torch.dtype) -> Any:
    import transformers

    check_components(folder, index, [name], [name])
    kind = component_class(folder, index, name)
    if not issubclass(kind, transformers.PreTrainedModel):
        raise ModelError(f'Component "{name}" of "{folder}" is a {index[name][1]}, not a model of transformers.')
    held = stored_shapes(folder / name, STEMS[1])
    with _quiet(folder), in_words(folder, name), _no_larger_than(folder, name, held):
        module, info = from_pretrained(
            kind,
            folder / name,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they come with the loading information, by name
            output_loading_info=True,
        )
    _refuse(folder, name, loading_fault(info))
    return module.eval().requires_grad_(False)


VIDEO = {"frames": int, "height": int, "width": int, "fps": float, "shift": float}  # entries of video.json


def read_defaults(folder: Path) -> dict[str, float]:
    """Frames, height, width, fps and shift of the checkpoint: video.json beside model_index.json, or the defaults of its kind."""
    file = folder / "video.json"
    values = read_if_there(file)
    if unknown := sorted(set(values) - VIDEO.keys()):
        raise ModelError(f"{file} has unknown entries {unknown}; known: {', '.join(VIDEO)}.")
    with in_words(folder, file.name):
        demand(values, {key: VIDEO[key] for key in values}, str(file))
    for key, value in values.items():
        if value <= 0:
            raise ModelError(f"{file}: {key!r} must be positive, got {value}.")
    index = read_index(folder)
    if index["_class_name"].startswith("Wan") and index.get("expand_timesteps"):  # Wan 2.2 5B
        return {"frames": 121, "height": 704, "width": 1280, "fps": 24.0, **values}
    if (
        index["_class_name"].startswith("HunyuanVideo15")
        and read_config(folder, "transformer").get("target_size") == 960
    ):
        return {"height": 720, "width": 1280, **values}
    return values


def fingerprint(folder: Path, names: Iterable[str]) -> str:
    """A hash of the content of components (or single files) that does not depend on where they lie. Small files count in full, of large ones the size
    and `samples` evenly spaced blocks: reading 16 GB of a text encoder would take longer than encoding the prompts, and training changes every
    block."""
    sha, block, samples = hashlib.sha256(), 1 << 16, 16
    for name in sorted(names):
        for file in sorted(path for path in (folder / name, *(folder / name).rglob("*")) if path.is_file()):
            size = file.stat().st_size
            sha.update(f"{file.relative_to(folder).as_posix()}/{size}/".encode())
            with file.open("rb") as stream:
                if size <= block * samples:
                    sha.update(stream.read())
                    continue
                for sample in range(samples):
                    stream.seek((size - block) * sample // (samples - 1))
                    sha.update(stream.read(block))
    return sha.hexdigest()
