"""`sage-grpo probe` of cheap ways: rank correlations against known ones, the same noises for all ways, and a recommendation that `train` takes."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
import torch

from sage_grpo.data.groups import Member
from sage_grpo.distributed.world import World
from sage_grpo.models.cheap import CheapSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.windows import Window
from sage_grpo.tools.probe import ways as module
from sage_grpo.tools.probe.estimate import Estimate
from sage_grpo.tools.probe.probe import Prober
from sage_grpo.tools.probe.spec import ProbeSpec, WaysSpec
from sage_grpo.tools.probe.ways import (
    CheapSetting,
    Measured,
    WayKeys,
    choose_ways,
    correlation,
    recommend,
    spearman,
    ways,
)
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.inputs import load_rewards, prompts_from

OWN = CheapSetting(after=3, before=2, solver="euler", cheap=CheapSpec())


def test_spearman_is_the_correlation_of_ranks() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 4000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Without ties: 1 - 6 sum d^2 / n (n^2 - 1).
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert spearman([1, 1, 2, 3], [0, 0, 5, 9]) == pytest.approx(1)
    ties, order = [1.5, 1.5, 3, 5, 5, 5], [1, 2, 3, 4, 5, 6]
    pearson = float(torch.corrcoef(torch.tensor([ties, order]))[0, 1])
    assert spearman([1, 1, 2, 3, 3, 3], order) == pytest.approx(pearson)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(spearman([1, math.nan, 2], [1, 2, 3]))


def test_correlations_are_within_groups_and_leave_out_what_ranks_nothing() -> None:
    torch.manual_seed(0)
    full = torch.randn(40, 2, 8)
    level = 100 * torch.randn(40, 2, 1)  # of a group: ranks nothing inside it
    assert correlation(level + full, full).value == pytest.approx(1)
    assert abs(correlation(level + torch.randn(40, 2, 8), level + full).value) < 0.15
    noisy = correlation(full + torch.randn(40, 2, 8), full)
    assert noisy.low < 0.68 < noisy.high  # (6 / pi) asin(rho / 2) of rho = 1 / sqrt 2
    some = full.clone()
    some[:38] = 0.0  # a reward that does not tell their clips apart
    some[38, 0] = torch.nan
    assert correlation(some, full) == correlation(full[[38, 39]], full[[38, 39]])
    with pytest.raises(ValueError, match="Only 1 of 40 prompts have clips that a reward tells apart"):
        correlation(some.index_fill(0, torch.tensor([38]), 0.0), full)


def test_noises_are_of_the_prompt_the_start_and_the_clip() -> None:
    keys = WayKeys(seed=3, iteration=0, prompt=1)
    (found,) = keys.step([Member(2, 5)], 4, (6,))
    assert torch.equal(found, keyed_noise((6,), "ways", 3, 1, 2, 5, 4))
    assert not torch.equal(found, replace(keys, prompt=2).step([Member(2, 5)], 4, (6,))[0])


def test_the_cheapest_way_that_is_surely_alike_is_recommended() -> None:
    def found(after: int, low: float, passes: float, seconds: float = 1.0) -> Measured:
        one = Estimate(value=low + 0.05, low=low, high=1.0)
        return Measured(way=replace(OWN, after=after), passes=passes, seconds=seconds, correlation=one, reward=one)

    rows = [found(4, 0.99, 5.0, 0.5), found(3, 0.90, 4.0), found(2, 0.85, 3.0), found(1, 0.90, 4.0)]
    assert recommend(rows, 0.9) is rows[1]
    assert recommend(rows, 0.8) is rows[2]
    assert recommend(rows, 0.995) is None


@pytest.fixture
def prober_of(make_config):
    """A prober of the guided toy, whose clips branch at step 3 of 9."""

    def make(spec: WaysSpec, **rollout) -> Prober:
        config = make_config(
            rollout={"steps": 9, "same_noise": True, "window": Window(kind="drawn", at=[3]), **rollout},
            kernel=KernelSpec(name="sage_exact", eta=1.0),
            batch=BatchConfig(prompts=2, group_size=4, micro_batch=6),
        )
        config = replace(config, model=replace(config.model, family="trainer_zoo.guided", guidance_scale=3.0))
        config = replace(config, evaluate=replace(config.evaluate, steps=30))
        prompts = prompts_from(config.data.prompts, split="train")[:2]
        model = config.model.load()
        reward = load_rewards(config, prompts, World())
        probe = ProbeSpec(prompts=2, starts=2, members=8, ways=replace(spec, measure=True))
        return Prober(config, probe, model, reward, prompts, model.encode([prompt.text for prompt in prompts]))

    return make


@contextmanager
def silent(name: str, total: int):
    done: list[int] = []
    yield lambda: done.append(1)
    assert len(done) == total, "the bar does not end where it was said to"


def test_the_full_way_is_alike_itself_and_cheaper_ones_less_so(prober_of) -> None:
    spec = WaysSpec(after=[15, 5, 1], solvers=["euler"], cheap=[CheapSpec(guidance=(0.0, 0.01))])
    prober = prober_of(spec, before_steps=10)
    _, full, _ = choose_ways(prober)
    assert full.before + full.after == pytest.approx(30 * 8 / 9, abs=3)  # an even grid, and a step of 9 explores
    spec = replace(spec, after=[full.after, 5, 1], before=[full.before])
    prober = replace(prober, spec=replace(prober.spec, ways=spec))
    found = ways(prober, lambda text: None, silent)
    exact, unguided = found.ways[:3], found.ways[3:]
    assert asdict(exact[0].correlation) == pytest.approx({"value": 1.0, "low": 1.0, "high": 1.0})
    assert exact[0].reward.value == 0.0
    assert exact[0].passes == found.full_passes
    assert exact[1].correlation.value > exact[2].correlation.value
    assert all(one.correlation.value < 1 for one in unguided)
    # Guided, in groups of four: a trunk and its exploring step once, and then every clip for itself.
    assert exact[2].passes == 2 * (full.before + 1) / 4 + 2 * 1
    assert unguided[2].passes == (full.before + 2) / 4 + 1
    assert "guided 0..0.01" in module.described(unguided[0].way)
    assert (found.step, found.best) == (3, recommend(found.ways, spec.least))
    told = module.ways_document(prober, found)
    assert (told["step"], told["least"], told["judged_by"]) == (3, 0.8, "passes")
    assert told["sampled"]["velocities"] == found.passes
    assert told["full"]["passes_per_clip"] == found.full_passes
    row = told["ways"][3]
    assert (row["passes_per_clip"], row["correlation"]) == (unguided[0].passes, asdict(unguided[0].correlation))
    own = {"solver": "euler", "after_steps": full.after, "before_steps": full.before}
    assert row["way"] == {**own, "cheap": {"guidance": [0.0, 0.01]}}
    assert told["recommended"] == found.best.way.fields()


@pytest.mark.slow
def test_trunks_that_ways_share_change_nothing(prober_of) -> None:
    prober = prober_of(WaysSpec(after=[3], cheap=[CheapSpec(negative_every=2)]))
    shared = ways(prober, lambda text: None, silent)
    for place, one in enumerate(shared.ways):
        way = one.way
        alone = WaysSpec(after=[way.after], solvers=[way.solver])
        rollout = replace(prober.config.rollout, cheap=way.cheap)
        single = replace(prober, config=replace(prober.config, rollout=rollout), spec=replace(prober.spec, ways=alone))
        found = ways(single, lambda text: None, silent).ways[0]
        assert found.way == way, place
        assert (found.correlation, found.reward, found.passes) == (one.correlation, one.reward, one.passes)
