"""A comparison on a Ray cluster has the rows of one machine, also when it is interrupted or loses a node in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import needs
from sage_grpo.config.parsing import ConfigError
from sage_grpo.recipes import recipe
from sage_grpo.run.identity import of_code
from sage_grpo.tools.compare import cluster, machine, store
from sage_grpo.tools.compare.cluster import TRIES, Place, Remote
from sage_grpo.tools.compare.engine import PlaceLost
from sage_grpo.tools.compare.measure import measure
from sage_grpo.tools.compare.prepare import prepare

ROOT = Path(__file__).parent.parent.parent


class Gone(Exception):
    """As Ray says that an actor is not there."""


class Node:
    """A place as a handle of Ray's: what it is asked comes from here."""

    def __init__(self, *said: Any, shares: bool = True) -> None:
        self.said, self.killed = list(said), False
        self.facts = SimpleNamespace(remote=lambda: {"node": "far", "shares": shares})
        asked = SimpleNamespace(remote=lambda line, config: self.said)
        self.answer = SimpleNamespace(options=lambda num_returns: asked)


def got(value: Any) -> Any:
    """As ray.get."""
    if isinstance(value, Exception):
        raise value
    return value


RAY = SimpleNamespace(
    get=got,
    wait=lambda asked, timeout: (asked, []),
    kill=lambda node: setattr(node, "killed", True),
    exceptions=SimpleNamespace(RayActorError=Gone, ObjectLostError=Gone),
)
"""Ray, as far as a worker talks to it."""


def worker(*nodes: Any, weights: bool = False) -> Remote:
    """A worker whose places are these, one after another."""
    return Remote(RAY, iter(nodes).__next__, Path("out"), weights=weights)


@pytest.fixture
def line(tmp_path: Path) -> str:
    """A job, as far as the engine reads it."""
    (tmp_path / "arm.yaml").write_text("seed: 1")
    return json.dumps({"file": str(tmp_path / "arm.yaml"), "weights": None, "unfinished": "kept"})


def test_a_worker_says_what_its_node_says_and_finds_another_place_when_it_is_lost(line: str) -> None:
    first, second = Node({"ready": of_code()}, {"done": 1}, Gone()), Node({"ended": "It ended."})
    one = worker(first, second)
    assert one.ready()
    said = one.answer(line)
    assert [next(said), next(said)] == first.said[:2]
    with pytest.raises(PlaceLost, match="Its node far was lost"):
        next(said)
    assert first.killed  # it may only seem lost
    assert one.ready()
    assert list(one.answer(line)) == [{"ended": "Node far: It ended."}]
    one.close(now=False)
    assert second.killed
    assert not one.ready()


@pytest.mark.parametrize(("said", "heard"), [("done", [["ended"]]), ("row", [])])
def test_a_place_that_we_ended_is_not_lost_and_nothing_is_heard_of_it_after_its_row(said, heard, line: str) -> None:
    """When the last row is there all workers are closed, and one may still wait for the end of what its node says."""
    one = worker(Node({said: {}}, Gone()))
    assert one.ready()
    answers = one.answer(line)
    next(answers)
    one.close(now=True)
    assert [list(words) for words in answers] == heard


def test_nodes_that_cannot_make_runs_are_named(line: str) -> None:
    broken = Node()
    broken.facts.remote = lambda: Gone("no module sage_grpo")
    with pytest.raises(ConfigError, match="Ray says: no module sage_grpo"):
        worker(*[broken] * TRIES).ready()
    assert worker(*[broken] * (TRIES - 1), Node()).ready()
    other = worker(Node({"ready": "0.1/of another time"}))
    assert other.ready()
    with pytest.raises(ConfigError, match="Node far has other code"):
        next(iter(other.answer(line)))
    with pytest.raises(ConfigError, match="far does not see out"):
        worker(Node(shares=False), weights=True).ready()
    assert worker(Node(shares=False)).ready()


@pytest.mark.parametrize("shares", [True, False])
def test_a_node_with_another_disk_has_the_configuration_from_us_and_keeps_nothing(
    shares: bool, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Echo:
        def __init__(self, folder: Path, number: int, environment: Any) -> None:
            self.folder, self.rest = folder, (number, environment)

        def answer(self, line: str) -> Iterator[dict[str, Any]]:
            yield json.loads(line)

    monkeypatch.setattr(cluster, "Process", Echo)
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / cluster.MARK).write_text("this comparison" if shares else "an older one")
    place = Place(0, str(tmp_path), "this comparison", {}, "nowhere")
    assert place.facts()["shares"] is shares
    assert (place._process.folder == tmp_path) is shares
    assert place._process.rest == (0, {})
    (asked,) = place.answer(line, "seed: 1")
    assert Path(asked["file"]).read_text() == "seed: 1"
    assert (asked == json.loads(line)) is shares
    assert (asked["unfinished"] is None) is not shares


@pytest.mark.parametrize(
    ("has", "device", "needs", "room"),
    [
        ({"CPU": 5.0}, "cuda", 0, 5),
        ({"CPU": 5.0, "GPU": 1.0}, "cpu", 0, 5),
        ({"CPU": 90.0, "GPU": 2.0}, "cuda", 1 / 16, 32),
        ({"CPU": 3.0, "GPU": 2.0}, "cuda", 1 / 16, 3),
    ],
)
def test_a_cluster_has_room_for_as_many_runs_as_its_cores_and_gpus_serve(
    has, device, needs, room, tmp_path, monkeypatch
) -> None:
    asked: list[dict[str, float]] = []

    def remote(**resources: float) -> Callable[[type], Any]:
        asked.append(resources)
        return lambda kind: SimpleNamespace(remote=lambda *words: words)

    nodes = [{"Alive": True}, {"Alive": False}]
    ray = SimpleNamespace(cluster_resources=lambda: has, remote=remote, nodes=lambda: nodes)
    monkeypatch.setattr(cluster, "connected", lambda address: nullcontext(ray))
    config = recipe("shapes/sage")
    configs = [replace(config, model=replace(config.model, device=device))] * 40
    with cluster.Cluster().open(configs, tmp_path, None) as (workers, where):
        assert (len(workers), asked) == (room, [{"num_cpus": 1, "num_gpus": needs}])
        assert "1 node(s)" in where
        mark = (tmp_path / "logs" / cluster.MARK).read_text()
        own = (str(tmp_path), mark, machine.environment([], 0), str(Path.cwd()))
        assert [one._make() for one in workers[:2]] == [(number, *own) for number in (0, 1)]
    with cluster.Cluster().open(configs, tmp_path, 2) as (workers, _):
        assert len(workers) == 2
    has.clear()
    with pytest.raises(ConfigError, match="no core"), cluster.Cluster().open(configs, tmp_path, None):
        pass


def test_what_cannot_be_is_refused_before_anything_starts(monkeypatch) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "sage-grpo\[ray\]"'), cluster.connected(None):
        pass
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))  # nobody asks more
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for address in (f"127.0.0.1:{closed.getsockname()[1]}", "ray://head", "head"):
            with pytest.raises(ConfigError, match=f"No Ray cluster answers at '{address}'"), cluster.connected(address):
                pass


def wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Until a process has done it."""
    while not what():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.dist
def test_interrupted_and_continued_on_a_cluster_that_loses_a_node_its_rows_are_those_of_one_machine(
    toy_options: dict[str, Any], tmp_path: Path
) -> None:
    """First on a cluster that the command starts itself, until a run is kept; then on two nodes, one of which is lost in the middle of a run."""
    if find_spec("ray") is None:  # imported here it would leave its traces
        needs.lacking("ray")
    out = tmp_path / "out"
    words = ["compare", "shapes/sage", "shapes/branch", "--seeds", "1", "--iterations", "96", "--points"]
    words += [json.dumps(list(range(4, 96, 4))), "--out", str(out), "--on", "ray"]
    own = {key: value if isinstance(value, str) else json.dumps(value) for key, value in toy_options.items()}
    words += ["--set", *(f"{key}={value}" for key, value in own.items())]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])

    def start(*words: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.Popen([sys.executable, *words], env=environment, text=True, **options)

    def kept() -> dict[str, int]:
        over = [row["key"] for row in store.read_rows(out / store.ROWS)]
        keys = [place.name for place in out.glob("unfinished/*") if place.name not in over]
        return store.kept(out, keys)

    with start(str(Path(__file__).with_name("ray_nodes.py")), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as nodes:
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        with start("-m", "sage_grpo", *words, "--jobs", "1", stderr=subprocess.PIPE) as process:
            wait_for(kept, process)
            process.send_signal(signal.SIGTERM)
            assert "The same command continues" in process.communicate()[1]
            assert process.returncode == 130
        before = kept()
        address = nodes.stdout.readline().strip()
        with start("-m", "sage_grpo", *words, "--address", address, stderr=subprocess.PIPE) as process:
            wait_for(lambda: len({key for key, at in kept().items() if at != before.get(key)}) == 2, process)
            nodes.stdin.write("lose one\n")
            nodes.stdin.flush()
            told = process.communicate()[1]
        nodes.stdin.close()
    assert process.returncode == 0, told
    assert "2 side by side on a Ray cluster of 2 node(s)." in told
    assert told.count("was lost") == 1
    assert told.count("goes on after iteration") >= 2
    rows = {row["key"]: row for row in store.read_rows(out / store.ROWS)}
    jobs = prepare(store.load_suite(out)[0], recipe)
    assert rows.keys() == {job.key for job in jobs}
    for job in jobs:
        whole = json.loads(json.dumps(measure(job, {}, lambda done: None)))
        assert {**rows[job.key], "seconds": None} == {"suite": "out", **whole, "seconds": None}
