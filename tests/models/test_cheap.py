"""Passes that nothing is learned from: which steps go without the negative branch, and refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sage_grpo.models import ModelError
from sage_grpo.models.cheap import CheapSpec, check_negative

SIGMAS = [1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1]
EXPLORES = [False, False, False, True, False, False, False, False]


def always(sigma: float) -> bool:
    return True


@pytest.mark.parametrize(("interval", "every"), [(None, 2), ((0.2, 0.92), 3), ((0.0, 0.6), 9), ((0.2, 0.92), 1)])
def test_how_steps_are_guided(interval: tuple[float, float] | None, every: int) -> None:
    found = CheapSpec(guidance=interval, negative_every=every).guides(SIGMAS, EXPLORES, always)
    low, high = interval or (0.0, 1.0)
    assert [guide == "exact" for guide in found] == EXPLORES
    for sigma, guide in zip(SIGMAS, found):
        assert guide == "exact" or (guide == "none") == (not low <= sigma <= high)
    for index, guide in enumerate(found):
        if guide == "reused":
            last = max(place for place in range(index) if found[place] != "reused")
            assert found[last] == "whole"  # neither exact nor before the interval
            assert index - last < every
    if every > 1:  # and no more often than that
        assert ("whole", "whole") not in pairwise(found)


def test_another_expert_adds_its_own_guidance() -> None:
    found = CheapSpec(negative_every=9).guides(SIGMAS, [False] * 8, lambda sigma: sigma > 0.75)
    assert found == ("whole", *["reused"] * 3, "whole", *["reused"] * 3)


def test_no_negative_branch_no_saving() -> None:
    for spec in (CheapSpec(guidance=(0.2, 0.8)), CheapSpec(negative_every=2)):
        with pytest.raises(ModelError, match="this run has none"):
            check_negative(spec, lambda sigma: 1)
        check_negative(spec, lambda sigma: 2 if sigma > 0.5 else 1)  # one of two experts has one
    check_negative(CheapSpec(), lambda sigma: 1)
    with pytest.raises(ValueError, match="is empty: give the lower"):
        CheapSpec(guidance=(0.8, 0.8))


def test_removed_settings_of_earlier_runs_are_taken_where_they_are_off(tmp_path) -> None:
    from sage_grpo.config.parsing import ConfigError, parse
    from sage_grpo.training.config import TrainConfig

    file = tmp_path / "config.yaml"
    file.write_text(
        "rollout: {cheap: {cache: null, cache_threshold: 0.08, cache_every: 2, attention: null}}\nmodel: {decoder: null}"
    )
    assert parse(TrainConfig, ["--config", str(file)], prog="test") == TrainConfig()
    file.write_text("rollout: {cheap: {cache: taylorseer}}")
    with pytest.raises(ConfigError, match=r"no option 'rollout\.cheap\.cache' any more"):
        parse(TrainConfig, ["--config", str(file)], prog="test")
