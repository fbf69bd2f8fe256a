"""What an iteration leaves behind: figures of its updates, the policy that lags, the anchor, and the names of evaluated clips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sage_grpo.parallel.world import World
from sage_grpo.recipes.methods import METHODS
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training import update as update_module
from sage_grpo.training.config import AnchorConfig, EvalConfig, UpdateConfig
from sage_grpo.training.scoring import compose
from sage_grpo.training.update import Tally, mean_of, summarize
from trainer_helpers import same, watch_starts, weights_of


def test_metrics_of_updates_are_means_but_for_the_largest_ratio() -> None:
    """The largest over all updates, and that of the first alone, which tells whether replay is exact."""
    logs = [
        {"ratio/largest_log": 1e-6, "loss/policy": 1.0},
        {"ratio/largest_log": 0.5, "loss/policy": 3.0, "kl/position": 2.0},
        {"ratio/largest_log": 0.25, "loss/policy": 5.0, "kl/position": 4.0},
    ]
    assert mean_of(logs) == {
        "ratio/largest_log": 0.5,
        "ratio/first_log": 1e-6,
        "loss/policy": 3.0,
        "kl/position": 3.0,  # of the updates that have it
    }
    assert mean_of([{"loss/policy": 1.0}]) == {"loss/policy": 1.0}, "a loss without a ratio"


class Two(World):
    """Two ranks, of which the other one has these figures."""

    def __init__(self, other: Tally) -> None:
        super().__init__()
        self.other = other

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, self.other.largest_log_ratio.expand(1)])


@pytest.mark.parametrize(("own", "others"), [(0.25, 0.5), (0.5, 0.25)])
def test_the_largest_ratio_is_that_of_all_ranks(own: float, others: float) -> None:
    """Sums are added up, it is not; nor is it the last item's."""
    tallies = []
    for largest in (own, others):
        tally = Tally()
        tally.largest_log_ratio = torch.tensor(largest, dtype=torch.float64)
        for name in ("ratio/mean", "ratio/square", "gradient/policy", "gradient/kl"):
            tally.sums[name] += 0.0
        tallies.append(tally)
    assert summarize(tallies[0], Two(tallies[1]), [])["ratio/largest_log"] == 0.5


def test_the_ramp_begins_with_the_first_iteration(make_config, make_trainer) -> None:
    """After one of two iterations half of the share stays, after both all of it."""
    config = METHODS["nft"](make_config(rollout={"steps": 3}))
    config = replace(config, objective=replace(config.objective, old_decay=0.8, old_ramp=2))
    trainer = make_trainer(config)
    old = {name: value.double() for name, value in weights_of(trainer).items()}
    for kept in (0.4, 0.8, 0.8):
        trainer.step()
        old = {name: kept * old[name] + (1 - kept) * live.double() for name, live in weights_of(trainer).items()}
        for name, copy in trainer.state.old.copies.items():
            torch.testing.assert_close(copy.double(), old[name], rtol=0.0, atol=1e-6)


def test_an_anchor_is_live_after_going_back_only_if_it_was_then(make_config, make_trainer, tmp_path: Path) -> None:
    """Two updates an iteration, renewed after every third: live after three iterations, not after one or four."""
    config = make_config(
        iterations=9, trust_region=TrustRegion(mode="moving"), anchor=AnchorConfig(every=3), rollout={"steps": 3},
        update=UpdateConfig(updates_per_rollout=2),
    )  # fmt: skip
    trainer = make_trainer(config)
    state, folders, live = trainer.state, [], []
    for _ in range(4):
        trainer.step()
        folders.append(trainer.save(tmp_path))
        live.append(state.anchor.is_live(state.updates))
    assert live == [False, False, True, False]
    for folder, was_live in ((folders[0], False), (folders[2], True), (folders[0], False)):
        state.go_back(folder, trainer.world)
        assert state.updates == 8
        assert same(weights_of(trainer), state.anchor.copies) == was_live
        assert state.anchor.is_live(state.updates) == was_live


def test_clips_of_an_evaluation_have_one_name_if_and_only_if_they_have_one_noise(
    make_config, make_trainer, tmp_path: Path
) -> None:
    """Reports pair clips of several evaluations by it; two prompts may share a seed of their own."""
    file = tmp_path / "prompts.csv"
    file.write_text("prompt,seed\na cat,7\na dog,\na bird,8\nthe sea,\n")
    settings = EvalConfig(prompts=4, per_prompt=3, steps=1, seed=5)
    config = make_config(evaluate=settings)
    names: dict[str, torch.Tensor] = {}
    for seed in (5, 6):
        config = replace(
            config, evaluate=replace(settings, seed=seed), data=replace(config.data, eval_prompts=str(file))
        )
        trainer = make_trainer(config)
        starts, rows = watch_starts(trainer), trainer.evaluate().rows
        starts = [start for batch in starts for start in batch]
        assert [row["prompt"] for row in rows] == [
            text for text in ("a cat", "a dog", "a bird", "the sea") for _ in "123"
        ]
        assert len(starts) == len(rows) == 12
        for row, start in zip(rows, starts, strict=True):
            assert torch.equal(names.setdefault(row["noise"], start), start), row
    # Seeds 7, 8, 9 and 8, 9, 10 of their own, whatever the evaluation's; and six others for each of that.
    assert len(names) == 4 + 2 * 6
    assert len({tuple(start.flatten().tolist()) for start in names.values()}) == len(names)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_what_is_carried_back_over_a_step_is_free_of_the_weights_of_the_loss(scale: float) -> None:
    """The backward pass brings -scale weight J^T push; a clip that counts nothing brings nothing, and keeps what it had."""
    push, came = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.5], [-3.0], [7.0]])
    item = SimpleNamespace(push=update_module.Push(push), weight=torch.tensor([0.25, 0.5, 0.0]))
    x = torch.zeros(3, 1, requires_grad=True)
    x.grad = -scale * item.weight[:, None] * came
    update_module._carry(item, x, scale)
    torch.testing.assert_close(item.push.gradient, torch.tensor([[1.5], [-1.0], [3.0]]))


@pytest.mark.parametrize(("device", "between"), [("cpu", False), ("cuda", True)])
def test_rewards_leave_an_accelerator_between_their_calls(device: str, between: bool, make_config) -> None:
    assert compose(make_config(), torch.device(device)).offload_between == between


def test_an_iteration_tells_how_its_clips_look(make_config, make_trainer) -> None:
    """Where somebody decoded them."""
    trainer = make_trainer(make_config())
    assert trainer.step()["video/spread"] > 0
    judge = trainer.judge
    trainer.judge = lambda rollout, plan: replace(judge(rollout, plan), thumbnails=None)
    assert not [name for name in trainer.step() if name.startswith("video/")]
