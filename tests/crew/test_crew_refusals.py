"""What workers cannot do is refused before anything is loaded, with the reason."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sage_grpo.configure import ConfigError
from sage_grpo.crew import on_ray
from sage_grpo.crew.jobs import CrewError
from sage_grpo.models.lora import LoraSpec
from sage_grpo.parallel import cluster
from sage_grpo.parallel.spec import RaySpec
from sage_grpo.recipes.methods import dpo, nft
from sage_grpo.session.preflight import preflight
from sage_grpo.training.inputs import Given

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(make_config):
    made = make_config(model={"lora": LoraSpec(rank=2)})
    return replace(made, rollout=replace(made.rollout, on="ray"))


def stale(config):
    return replace(config, rollout=replace(config.rollout, staleness=1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: replace(c, model=replace(c.model, lora=None)), "model.lora null"),
        (lambda c: nft(stale(c)), "objective.kind nft: it learns at noise levels without the log-probability"),
        (lambda c: replace(dpo(c), data=replace(c.data, clips="own.jsonl"), rewards=[]), "data.clips: clips are given"),
        (
            lambda c: replace(
                c,
                rollout=replace(c.rollout, on="here", staleness=1),
                optimizer=replace(c.optimizer, max_kl=1.0),
            ),
            "rollout.staleness 1 does not go with optimizer.target_kl or max_kl",
        ),
        (
            lambda c: replace(c, rollout=replace(c.rollout, on="here", ray=RaySpec(workers=3))),
            "rollout.ray is about workers on Ray",
        ),
    ],
)
def test_configurations(config, change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        change(config)


def test_what_only_the_start_knows(config, monkeypatch) -> None:
    monkeypatch.setattr(on_ray, "find_ray", lambda address: None)
    with pytest.raises(CrewError, match=r"2 training processes without rollout.ray.address"):
        preflight(config, ranks=2)
    there = replace(config, rollout=replace(config.rollout, ray=RaySpec(address="127.0.0.1:1", workers=1)))
    with pytest.raises(CrewError, match=r"2 training processes with rollout.ray.workers 1"):
        preflight(there, ranks=2)
    with pytest.raises(CrewError, match=r"2 training processes parallel.sp 2"):
        preflight(replace(there, parallel=replace(there.parallel, sp=2)), ranks=2)
    with pytest.raises(CrewError, match="cannot have the reward mine that this program made"):
        preflight(config, given=Given(rewards={"mine": None}))  # type: ignore[dict-item]
    assert not [text for text in preflight(config) if "task" in text]
    many = replace(config, rollout=replace(config.rollout, ray=RaySpec(workers=9)))
    assert any("9, but an iteration has 2 task(s), so that 7" in text for text in preflight(many))


def test_without_the_package_the_extra_is_named(config, monkeypatch) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", cluster.LOOPBACK):
        monkeypatch.setenv(name, "0")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "sage-grpo\[ray\]"'):
        preflight(config)


def test_a_cluster_that_others_could_reach_is_not_used(monkeypatch) -> None:
    class Ray:
        open = False

        def is_initialized(self) -> bool:
            return False

        def init(self, **options: object) -> None:
            self.open = True

        def nodes(self) -> list[dict[str, str]]:
            return [{"NodeManagerAddress": "192.0.2.7"}]

        def shutdown(self) -> None:
            self.open = False

    ray = Ray()
    monkeypatch.setattr(cluster, "find_ray", lambda address: ray)
    with (
        pytest.raises(ConfigError, match=r"listens on 192.0.2.7, where others could run code"),
        cluster.connected(None),
    ):
        pass
    assert not ray.open


def test_the_manifest_is_yaml_and_keeps_strangers_away() -> None:
    cluster, policy = yaml.safe_load_all((ROOT / "examples" / "ray" / "kuberay.yaml").read_text())
    assert (cluster["kind"], policy["kind"]) == ("RayCluster", "NetworkPolicy")
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    assert head["rayStartParams"]["include-dashboard"] == "false"
    label = policy["spec"]["podSelector"]["matchLabels"]
    for group in (head, workers):
        assert group["template"]["metadata"]["labels"] == label, "the policy covers it"
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    pinned = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={cluster['spec']['rayVersion']}\n" in pinned
