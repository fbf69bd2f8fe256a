"""A dress rehearsal: random weights of the published sizes, an iteration of `train`, its resume, its export, and stock diffusers."""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.callbacks import journal
from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.world import World
from sage_grpo.models.devices import DTYPES, choose_device
from sage_grpo.models.family import FamilyModel
from sage_grpo.plan import hardware
from sage_grpo.plan.architecture import build_architecture
from sage_grpo.plan.changes import way_to_fit
from sage_grpo.plan.costs import Forecast, forecast
from sage_grpo.plan.formulas import GIB, MASTER, trainable
from sage_grpo.plan.published import BESIDE, PUBLISHED, SMALL, Configs
from sage_grpo.plan.show import verdict
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.preflight import preflight
from sage_grpo.run.session import run
from sage_grpo.tools.rehearse.model_folder import add_tokenizers, call_of, compare_in_stock, networks_of
from sage_grpo.tools.rehearse.rewards import random_reward
from sage_grpo.tools.rehearse.weights import RandomNumbers, RandomPart
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import NAMES, load_sources
from sage_grpo.training.offload import hold_to_budget
from sage_grpo.utils.clock import Clock
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.text import NONE, fixed, narrow_table

RESULT = "rehearsal.json"
OUTER = ("write", "train", "resume", "export", "stock")
"""Phases of the rehearsal itself; the others are within them."""
COPIES = 3  # checkpoints on disk while one is written, and exports: final, best and that of the rehearsal
EVALUATION_STEPS = 4  # where the configuration names none
LOADING = 2  # copies of a reward's weights in CPU memory: it loads in float32
WITHOUT_WEIGHTS = RewardSpec(name="video_stats", weights={"brightness": 1.0})
Export = Callable[[Path, Path], object]
"""Exports the run of a folder into another one, as `sage-grpo export` does."""


@dataclass(frozen=True)
class Row:
    """A phase of the rehearsal: measured, and planned where `plan` knows it."""

    phase: str
    seconds: float
    planned_seconds: float | None = None
    gib: float | None = None
    planned_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A rehearsal that is ready to run: its folder, the configuration of its run, and the random parts to write."""

    folder: Path
    config: TrainConfig
    configs: Configs
    components: Mapping[str, Sequence[Any]]  # library, class and, of networks, configuration
    networks: list[RandomPart]
    rewards: list[RandomPart]
    processes: int
    small: bool

    @property
    def parts(self) -> list[RandomPart]:
        return [*self.networks, *self.rewards]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.model.dtype]

    @cached_property
    def planned(self) -> Forecast:
        architecture = build_architecture(self.config.model, self.configs, source="its configuration")
        here = hardware.here(self.processes)
        # `plan` counts rewards at their published size.
        config = replace(self.config, rewards=[WITHOUT_WEIGHTS]) if self.small else self.config
        return forecast(config, here, gpus=self.processes, architecture=architecture)

    def disk(self) -> tuple[float, float]:
        """Bytes of the random weights, and of run and exports."""
        written = float(self.dtype.itemsize * sum(part.parameters for part in self.parts))
        job, trained = self.planned.job, MASTER * trainable(self.planned.network, self.planned.job)
        state = trained * (1 + job.moments + job.anchor + job.ema + job.max_kl)
        export = trained if job.lora_rank is not None else written
        return written, COPIES * (state + export)

    def check(self) -> None:
        """Refuse, with figures, what does not fit the disk, the CPU's memory or the GPU's."""
        faults, home = [], next(place for place in self.folder.resolve().parents if place.exists())
        free, (weights, rest) = shutil.disk_usage(home).free, self.disk()
        if weights + rest > free:
            faults.append(
                f"Disk: random weights take {weights / GIB:.1f} GiB, checkpoints and exports about {rest / GIB:.1f}, and {home} "
                f"has {free / GIB:.1f} free. Give --folder on another disk."
            )
        largest = max(part.parameters for part in self.parts) + LOADING * sum(part.parameters for part in self.rewards)
        needed, there = self.processes * self.dtype.itemsize * largest / GIB, hardware.cpu().gib
        if needed > there:
            faults.append(f"Memory: loading takes about {needed:.1f} GiB of CPU memory, and there are {there:.1f}.")
        if not self.planned.fits:
            faults.append(f"Memory: {'; '.join(verdict(self.planned, way_to_fit(self.planned)))}")
        if faults:
            raise ConfigError("The rehearsal does not fit.\n" + "\n".join(faults))

    def write(self) -> None:
        model = self.folder / "model"
        self.configs.write(model)
        numbers = RandomNumbers(self.dtype)
        for part in self.parts:
            part.write(numbers)
        add_tokenizers(model, self.components, self.networks)


def prepare(config: TrainConfig, folder: Path, *, small: bool, processes: int = 1) -> Rehearsal:
    """The rehearsal of a configuration; refuses models and rewards that cannot be written, and a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: a rehearsal writes into a new one (--folder).")
    name = str(config.model.path).rsplit("/", 1)[-1]
    known = [one for one, configs in PUBLISHED.items() if configs.family in BESIDE]
    if name not in known:
        raise ConfigError(
            f"model.path {config.model.path} cannot be rehearsed: its sizes are not known. Known: {', '.join(known)}."
        )
    if config.model.adapters or (config.model.lora is not None and config.model.lora.path is not None):
        raise ConfigError("A rehearsal has no trained weights: leave model.adapters and model.lora.path out.")
    configs = PUBLISHED[name]
    beside: Mapping[str, Sequence[Any]] = BESIDE[configs.family]
    if small:
        sizes = SMALL[configs.family]
        configs = replace(configs, transformer=sizes["transformer"], vae=sizes["vae"])
        beside = {key: [*entry[:2], *([sizes[key]] if key in sizes else [])] for key, entry in beside.items()}
        config = _small(config)
    components = {**configs.networks(), **beside}
    specs: list[RewardSpec] = []
    rewards: list[RandomPart] = []
    for number, spec in enumerate(config.rewards):
        spec, parts = random_reward(spec, folder / "rewards" / f"{number}-{spec.name.replace(':', '-')}", small=small)
        specs.append(spec)
        rewards += parts
    return Rehearsal(
        folder=folder,
        config=_configured(config, folder, specs, processes),
        configs=configs,
        components=components,
        networks=networks_of(folder / "model", components),
        rewards=rewards,
        processes=processes,
        small=small,
    )


def _configured(config: TrainConfig, folder: Path, rewards: list[RewardSpec], processes: int) -> TrainConfig:
    """The first start of the run: one iteration, short evaluations, and the files of the folder."""
    data, evaluate = config.data, replace(config.evaluate, early=[], prompts=min(processes, config.evaluate.prompts))
    if evaluate.steps is None and not config.model.sigmas:
        evaluate = replace(evaluate, steps=EVALUATION_STEPS)
    if isinstance(data.prompts, str) and data.prompts not in NAMES and not Path(data.prompts).exists():
        data = replace(data, prompts="starter", eval_prompts=None)
    return replace(
        config,
        out=str(folder / "run"),
        iterations=1,
        resume="auto",
        rewards=rewards,
        data=data,
        model=replace(config.model, path=str(folder / "model"), revision=None, cache=str(folder / "cache")),
        evaluate=evaluate,
    )


def _small(config: TrainConfig) -> TrainConfig:
    dtype = config.model.dtype if torch.cuda.is_available() else "float32"
    model = replace(config.model, frames=5, height=32, width=32, dtype=dtype)
    return replace(config, model=model, batch=replace(config.batch, prompts=min(2, config.batch.prompts)))


def rehearse(rehearsal: Rehearsal, world: World, export: Export, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Run all phases; the document in the main process, None in the others and after a request to stop."""
    config, folder, measured = rehearsal.config, rehearsal.folder, dict[str, float]()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        clock = Clock()
        with clock(name):
            yield
            world.barrier()
        measured.update(clock.report())
        gc.collect()
        torch.cuda.empty_cache()

    world.barrier()  # all have seen the empty folder
    with phase("write"):
        if world.is_main:
            rehearsal.write()
    for text in preflight(config, world.size):
        if world.is_main:
            say(text)
    with phase("train"):
        if run(config, world).stopped:
            return None
    with phase("resume"):
        ended = run(replace(config, iterations=2, resume="must"), world)
        if ended.stopped:
            return None
        prompt = load_sources(config)[0][0].text
        call, own = call_of(ended.model.stock_pipeline, prompt, ended.model.video), None
        # Not comparable: an EMA (exports hold it), a grid of one's own (not the scheduler's), states of two parts (LTX-2).
        if not (config.optimizer.ema or config.model.sigmas) and len(ended.model.latent_shape()) > 1:
            call["latents"], own = _first_velocity(ended.model, prompt)
        trained = ended.model.experts.components
        del ended
    with phase("export"):
        if world.is_main:
            export(folder / "run", folder / "export")
    with phase("stock"):
        stock = _in_stock(rehearsal, world, trained, call, own) if world.is_main else {}
    if not world.is_main:
        return None
    rows = _rows(rehearsal.planned, journal.read_rows(Path(config.out) / journal.METRICS), measured)
    document = {
        "device": rehearsal.planned.hardware.title,
        "processes": rehearsal.processes,
        "torch": torch.__version__,
        "parameters": {str(part.folder.relative_to(folder)): part.parameters for part in rehearsal.parts},
        "phases": [vars(row) for row in rows],
        "stock": stock,
    }
    replace_text(folder / RESULT, json.dumps(document, indent=1) + "\n")
    return document


def _first_velocity(model: FamilyModel, prompt: str) -> tuple[Tensor, Tensor]:
    """A noise, and the trained model's velocity there without guidance."""
    noise = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    conditions, found = model.encode([prompt]), list[Tensor]()
    model.unload_text()

    def velocity(x: Tensor, sigma: Tensor, **time: Any) -> Tensor:
        found.append(model.velocity(x, sigma, conditions, guidance=1.0, **time))
        return found[0]

    with torch.no_grad():  # by the checkpoint's own scheduler: random networks tell a time of 999 from one of 999.9
        model.solver(2).step(0, noise.to(model.device), velocity)
    return noise, found[0].float().cpu()


def _in_stock(
    rehearsal: Rehearsal, world: World, trained: Sequence[str], call: Mapping[str, Any], own: Tensor | None
) -> dict[str, float | None]:
    """Relative changes of the stock transformer's first output by training, and its distance from the run's own model."""
    folder, spec = rehearsal.folder, rehearsal.config.model
    device = choose_device(spec.device if world.device is None else world.device)
    hold_to_budget(replace(spec, memory=None), device)  # a stock pipeline has all of its parts on the GPU
    before, after = compare_in_stock(folder / "model", folder / "export", trained, call, device, rehearsal.dtype)
    return {
        "changed": _apart(after, before),
        "from_own": None if own is None else _apart(after, own),
        "from_own_untrained": None if own is None else _apart(before, own),
    }


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _rows(planned: Forecast, lines: Sequence[Mapping[str, float]], measured: Mapping[str, float]) -> list[Row]:
    """All phases in order, from the rows of metrics.jsonl and the rehearsal's own clock."""
    phases = {one.name: one for one in planned.phases}
    first, second = (place for place, line in enumerate(lines) if "time/update" in line)

    def row(name: str, line: Mapping[str, float]) -> Row:
        known = phases.get(name)
        figures = (None, None) if known is None else (known.seconds, known.memory.total / GIB)
        return Row(name, line[f"time/{name}"], figures[0], line.get(f"time/peak_gib_{name}"), figures[1])

    def iteration(line: Mapping[str, float], label: str) -> Row:
        return Row(label, line["time/total"], planned.iteration_seconds, _peak([line]), planned.peak / GIB)

    def start(name: str, rows: Sequence[Mapping[str, float]]) -> Row:
        last = {key: gib for key, gib in measured.items() if key == f"time/peak_gib_{name}"}  # since its last phase
        return Row(name, measured[f"time/{name}"], gib=_peak([*rows, last]))

    names = [name.removeprefix("time/") for name in lines[first] if name.startswith("time/")]
    inner = [name for name in names if name not in ("encode", "total") and not name.startswith("peak_gib_")]
    encoded, evaluated = ([line for line in lines if f"time/{name}" in line][:1] for name in ("encode", "evaluate"))
    return [
        row("write", measured),
        start("train", lines[:second]),
        *(row("encode", line) for line in encoded),  # in the row of the first evaluation, else of the iteration
        *(row(name, lines[first]) for name in inner),
        iteration(lines[first], "iteration 1"),
        *(replace(row("evaluate", line), planned_seconds=planned.evaluation_seconds) for line in evaluated),
        start("resume", lines[second:]),
        iteration(lines[second], "iteration 2"),
        row("export", measured),
        row("stock", measured),
    ]


def _peak(lines: Sequence[Mapping[str, float]]) -> float | None:
    return max((gib for line in lines for name, gib in line.items() if name.startswith("time/peak_gib_")), default=None)


def table(document: Mapping[str, Any]) -> Any:
    """The document as a table for the terminal."""
    heads = ("phase", "seconds", "planned", "GiB", "planned")
    shown = narrow_table(f"rehearsal on {document['processes']} x {document['device']}", *heads, left=("phase",))
    for row in document["phases"]:
        figures = [row[key] for key in ("seconds", "planned_seconds", "gib", "planned_gib")]
        inner = row["phase"] not in OUTER
        shown.add_row(
            "  " * inner + row["phase"], *(NONE if figure is None else fixed(figure, 1) for figure in figures)
        )
    return shown


def fault(document: Mapping[str, Any]) -> str:
    """The reason why the export is not what stock diffusers should run, or an empty string."""
    changed = document["stock"]["changed"]
    if not math.isfinite(changed):
        return "The transformer's output in stock diffusers is not finite."
    return "" if changed > 0 else "In stock diffusers the export changes nothing: it holds no training."


def summary(document: Mapping[str, Any], folder: Path | None) -> str:
    """The weights' size, the result in stock diffusers and the folder, as text."""
    stock, millions = document["stock"], sum(document["parameters"].values()) / 1e6
    lines = [f"{millions:,.1f} M random parameters."]
    lines += [
        fault(document) or f"In stock diffusers the export changes the transformer's output by {stock['changed']:.1e}."
    ]
    if stock["from_own"] is not None:
        apart = f"{stock['from_own']:.1e} (without the export {stock['from_own_untrained']:.1e})"
        lines.append(f"Its distance from the run's own model is {apart}.")
    return "\n".join([*lines, *([] if folder is None else [f"Everything is in {folder}; the figures in {RESULT}."])])
