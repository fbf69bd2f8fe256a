"""Runs of a comparison on a Ray cluster: each worker is an actor on some node, with a process that makes the runs."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.cluster import connected
from sage_grpo.tools.compare.engine import PlaceLost, Process
from sage_grpo.utils.safe_io import inside, replace_text

if TYPE_CHECKING:  # a node imports this module for `Place` alone
    from sage_grpo.training.config import TrainConfig

MARK = "cluster"
"""File in logs/ by which a node sees whether it has the same disk."""
TRIES = 3
"""Actors in a row that may end before they start."""


class Place:
    """The part of a worker that lives on a node (an actor of Ray's)."""

    def __init__(self, number: int, out: str, mark: str, environment: Mapping[str, str], home: str) -> None:
        seen = Path(out) / "logs" / MARK
        self._shares = seen.is_file() and seen.read_text() == mark
        self._folder = Path(out if self._shares else tempfile.mkdtemp(prefix="sage-grpo-"))
        with suppress(OSError):  # relative paths of a configuration start at the folder of the command
            os.chdir(home)
        self._process = Process(self._folder, number, environment)

    def facts(self) -> dict[str, Any]:
        """The node's name, and if it shares the comparison's folder."""
        return {"node": platform.node(), "shares": self._shares}

    def answer(self, line: str, config: str) -> Iterator[Mapping[str, Any]]:
        """Run a job and yield its messages. Without the comparison's folder its configuration comes from here, and it is not kept."""
        if not self._shares:
            file = self._folder / "config.yaml"
            replace_text(file, config)
            line = json.dumps({**json.loads(line), "file": str(file), "unfinished": None})
        yield from self._process.answer(line)


class Remote:
    """A worker on any node with room; it moves to another node when its own is lost."""

    def __init__(self, ray: Any, make: Callable[[], Any], out: Path, *, weights: bool) -> None:
        """`make` asks the cluster for a `Place`."""
        self._ray, self._make, self._out, self._weights = ray, make, out, weights
        self._place: Any = None
        self._node = ""
        self._closed = False

    def ready(self) -> bool:
        """Wait for room on a node."""
        fault: Exception | None = None
        for _ in range(TRIES):
            if not self._closed:
                place = self._place = self._place or self._make()
                asked = place.facts.remote()
            while not self._closed and not self._ray.wait([asked], timeout=0.5)[0]:
                pass
            if self._closed:
                return False
            try:
                facts = self._ray.get(asked)
            except self._ray.exceptions.RayActorError as error:  # it ended before it started, or we ended it
                self._place, fault = None, error
                continue
            if self._weights and not facts["shares"]:
                raise ConfigError(
                    f"--weights needs a folder that all nodes share, and {facts['node']} does not see {self._out}: choose another --out."
                )
            self._node = facts["node"]
            return True
        raise ConfigError(f"No node of the Ray cluster can make runs. Ray says: {fault}")

    def answer(self, line: str) -> Iterator[Mapping[str, Any]]:
        """The messages from the node."""
        from sage_grpo.run.identity import of_code

        config = Path(json.loads(line)["file"]).read_text(encoding="utf-8")
        try:
            for said in self._place.answer.options(num_returns="streaming").remote(line, config):
                words = self._ray.get(said)
                if "ready" in words and words["ready"] != of_code():
                    raise ConfigError(
                        f"Node {self._node} has other code of sage-grpo: install the same on all nodes (it has {words['ready'][:24]}..., "
                        f"here is {of_code()[:24]}...)."
                    )
                if "ended" in words:
                    words = {"ended": f"Node {self._node}: {words['ended']}"}
                yield words
                # Later items are not answers: after the last run we end the actor, and the stream with it.
                if "row" in words or "ended" in words:
                    return
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
            if self._closed:
                yield {"ended": "We ended it."}
                return
            self._ray.kill(self._place)  # perhaps it only seems lost: no run is made twice
            self._place = None
            raise PlaceLost(f"Its node {self._node} was lost ({type(error).__name__}).") from error

    def close(self, *, now: bool) -> None:
        """Release the node; a process without a job ends by itself."""
        self._closed = True
        if self._place is not None:
            self._ray.kill(self._place)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The engine of a Ray cluster."""

    address: str | None = None
    """HOST:PORT of its head, or `auto` for the one that this machine belongs to; None starts one here, on loopback."""
    weights: bool = False
    """Save the runs' weights, which takes a folder that all nodes share."""

    @contextmanager
    def open(
        self, configs: Sequence[TrainConfig], out: Path, most: int | None
    ) -> Iterator[tuple[Sequence[Remote], str]]:
        """Actors on its nodes; those beyond the present room wait for nodes that join."""
        from sage_grpo.tools.compare import machine

        with connected(self.address) as ray:
            has = ray.cluster_resources()
            cpus, gpus, many = int(has.get("CPU", 0)), int(has.get("GPU", 0)), machine.per_gpu(configs)
            on_gpu = gpus > 0 and any(config.model.device != "cpu" for config in configs)
            if cpus == 0:
                raise ConfigError(f"The Ray cluster has no core for a run: {has}. Start its nodes with --num-cpus.")
            needs, room = ({"num_gpus": 1 / many}, min(cpus, many * gpus)) if on_gpu else ({"num_gpus": 0}, cpus)
            mark = uuid4().hex
            replace_text(inside(out, "logs", MARK), mark)
            kind, words = ray.remote(num_cpus=1, **needs)(Place), (mark, machine.environment([], 0), str(Path.cwd()))
            makers = [partial(kind.remote, number, str(out.absolute()), *words) for number in range(len(configs))]
            workers = [Remote(ray, make, out, weights=self.weights) for make in makers[: most or room]]
            nodes = sum(node["Alive"] for node in ray.nodes())
            yield workers, f"a Ray cluster of {nodes} node(s)."
