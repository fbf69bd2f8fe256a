"""The anchor's pass runs where its KL can act, and only there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training import trainer as trainer_module
from sage_grpo.training.anchor import REST, Anchor
from sage_grpo.training.config import AnchorConfig
from trainer_helpers import assert_resumes_to_the_bit, resume, same, weights_of

WEAK = KlCoefficient(kind="constant", lambda_min=0.0, lambda_max=1e-9)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of items of every reference pass."""
    counts: list[int] = []
    original = trainer_module.with_anchor

    def counted(items, need, *rest):
        counts.extend([len(items)] * (need == "pass"))
        return original(items, need, *rest)

    monkeypatch.setattr(trainer_module, "with_anchor", counted)
    return counts


@pytest.mark.parametrize("kind", ["toy", pytest.param("wan_t2v", marks=pytest.mark.slow)])
def test_an_anchor_that_is_the_live_policy_takes_no_pass_and_changes_no_bit(
    kind: str, make_config, make_trainer, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates 0, 3 and 6 of eight follow a renewal."""
    strong = KlCoefficient(kind="constant", lambda_min=0.0, lambda_max=10.0)
    config = make_config(
        kind=kind, kl=strong, trust_region=TrustRegion(mode="dual"), anchor=AnchorConfig(every=3), rollout={"steps": 4}
    )
    trainer = make_trainer(config)
    for _ in range(4):
        trainer.step()
    assert len(passes) == 5
    assert all("kl/skipped" not in log for log in trainer.log)
    monkeypatch.setattr(Anchor, "is_live", lambda self, updates, later=0: False)
    always = make_trainer(config)
    for _ in range(4):
        always.step()
    assert len(passes) == 5 + 8
    assert same(weights_of(trainer), weights_of(always))
    assert trainer.log == always.log


def test_a_kl_too_small_to_act_is_left_out_after_it_was_measured(make_config, make_trainer, passes: list[int]) -> None:
    config = make_config(kl=WEAK, trust_region=TrustRegion(mode="fixed"), anchor=AnchorConfig(every=2, skip_below=1e-3))
    trainer, ticks = make_trainer(config), []
    trainer.clock.listen = lambda phase, done, total: ticks.append((phase, done, total))
    rows = [trainer.step() for _ in range(7)]
    # Two updates an iteration. The first is at its anchor; the next two are measured; eight rest, the first of them in an iteration
    # that had begun before; then one is measured again.
    assert [row["kl/skipped"] for row in rows] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert [{"kl/position", "kl/total", "loss/kl", "gradient/kl_share"} <= row.keys() for row in rows] == [
        *(True, True, False, False, False, False, True)
    ]
    assert len(passes) == 1 + 2 + 2
    # What the progress bar was promised was done.
    ends = [(done, total) for phase, done, total in ticks if phase == "update" and done]
    each = passes[0]
    totals = [total for done, total in ends if done == total]
    assert totals == [each * count for count in (3, 4, 2, 2, 2, 2, 4)]


@pytest.mark.parametrize("kind", ["ppo", "paper"])
def test_a_coefficient_that_goes_by_the_kl_always_measures_it(kind: str, make_config, make_trainer, passes) -> None:
    kl = KlCoefficient(kind=kind, lambda_min=1e-9, lambda_max=1e-9, warmup_updates=0)
    config = make_config(kl=kl, trust_region=TrustRegion(mode="fixed"), anchor=AnchorConfig(every=1, skip_below=0.9))
    trainer = make_trainer(config)
    for _ in range(3):
        trainer.step()
    assert len(passes) == 5


def test_a_run_that_leaves_passes_out_resumes_to_the_bit(make_config, make_trainer, tmp_path: Path) -> None:
    """The checkpoint after two iterations lies in a rest, at a renewal; a run that forgot it would measure."""
    config = make_config(
        iterations=4,
        kl=replace(WEAK, lambda_max=1e-2),
        trust_region=TrustRegion(mode="dual"),
        anchor=AnchorConfig(every=2, skip_below=0.5),
    )
    assert_resumes_to_the_bit(make_trainer, config, tmp_path)
    trainer = make_trainer(config)
    trainer.step()
    trainer.step()
    trainer.save(tmp_path / "again")
    trainer.writer.finish()
    other = make_trainer(config)
    resume(other, tmp_path / "again")
    assert other.state.reference.state_dict() == trainer.state.reference.state_dict()
    assert other.state.reference.rest == 2 * REST
    assert other.state.anchor.renewed_at == 4
