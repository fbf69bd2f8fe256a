"""What an iteration leaves behind: figures of its updates, the policy that lags, the anchor, and the names of evaluated clips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from double import CLOSE
from sage_grpo.distributed.spec import Layout
from sage_grpo.distributed.world import World
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.recipes.methods import METHODS
from sage_grpo.run.session import assemble
from sage_grpo.training import loss as losses
from sage_grpo.training.config import AnchorConfig, BatchConfig, EvalConfig, OptimizerConfig, UpdateConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.loss import UpdateSums, mean_of, summarize
from sage_grpo.training.state import load_weights
from trainer_helpers import plan_of, same, watch_starts, weights_of


def test_metrics_of_updates_are_means_but_for_the_largest_ratio() -> None:
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
    other = SimpleNamespace(trainable=lambda: {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="another model: only the model trains a "):
        load_weights(folders[0], other)


def test_clips_of_an_evaluation_have_one_name_if_and_only_if_they_have_one_noise(
    make_config, make_trainer, tmp_path: Path
) -> None:
    """Reports pair clips of several evaluations by it; two prompts may share a seed of their own."""
    file = tmp_path / "prompts.csv"
    file.write_text("prompt,seed\na cat,7\na dog,\na bird,8\nthe sea,\n")
    names: dict[str, torch.Tensor] = {}
    for seed in (5, 6):
        config = make_config(evaluate=EvalConfig(prompts=4, per_prompt=3, steps=1, seed=seed))
        trainer = make_trainer(replace(config, data=replace(config.data, eval_prompts=str(file))))
        starts, rows = watch_starts(trainer), trainer.evaluate().rows
        starts = [start for batch in starts for start in batch]
        texts = ("a cat", "a dog", "a bird", "the sea")
        assert [row["prompt"] for row in rows] == [text for text in texts for _ in range(3)]
        assert len(starts) == len(rows) == 12
        for row, start in zip(rows, starts, strict=True):
            assert torch.equal(names.setdefault(row["noise"], start), start), row
    # Seeds 7, 8, 9 and 8, 9, 10 of their own, whatever the evaluation's; and six others for each of that.
    assert len(names) == 4 + 2 * 6
    assert len({tuple(start.flatten().tolist()) for start in names.values()}) == len(names)


def test_what_is_carried_back_over_a_step_is_free_of_the_weights_of_the_loss() -> None:
    """The backward pass brings -scale weight J^T push; a clip that counts nothing brings nothing, and keeps what it had."""
    push, came = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.5], [-3.0], [7.0]])
    item = SimpleNamespace(reward_gradient=push, length=1.0, weight=torch.tensor([0.25, 0.5, 0.0]))
    x = torch.zeros(3, 1, requires_grad=True)
    x.grad = -4.0 * item.weight[:, None] * came
    losses.backpropagate(item, x, 4.0)
    torch.testing.assert_close(push, torch.tensor([[1.5], [-1.0], [3.0]]))


@pytest.mark.parametrize(("ahead", "until"), [(4, [2, 2, 2, 4]), (100, [6, 6, 6, 6])])
def test_prompts_are_encoded_as_far_ahead_as_asked(ahead: int, until: list[int], make_config, make_trainer) -> None:
    batch = BatchConfig(prompts=2, group_size=2, micro_batch=4)
    config = make_config(iterations=6, batch=batch, rollout={"steps": 3})
    trainer = make_trainer(replace(config, data=replace(config.data, eval_prompts=None, encode_ahead=ahead)))
    trainer.encode_prompts()
    found = [trainer.prompt_encoder.until]
    for _ in range(3):
        trainer.step()
        found.append(trainer.prompt_encoder.until)
        assert len(trainer.prompt_encoder.encoded) <= ahead
    assert found == until
    fresh = make_trainer(trainer.config)
    fresh.step()
    assert fresh.prompt_encoder.encoded, "the first iteration's prompts were not encoded before it"


@pytest.mark.parametrize(("own", "others"), [(0.25, 0.5), (0.5, 0.25)])
def test_the_largest_ratio_is_that_of_all_ranks(own: float, others: float) -> None:
    """Sums are added up, it is not; nor is it the last item's."""
    tally = UpdateSums()
    tally.largest_log_ratio = torch.tensor(own, dtype=torch.float64)
    for name in ("ratio/mean", "ratio/square", "gradient/policy", "gradient/kl", "loss/policy", "loss/kl"):
        tally.sums[name] += 0.0
    two = {
        "sum": lambda values: values * 2,
        "gather": lambda values: torch.stack([values, torch.full_like(values, others)]),
    }
    assert summarize(tally, SimpleNamespace(**two), [])["ratio/largest_log"] == 0.5


def without_sde(make_config, *, micro_batch: int = 3, old_decay: float = 0.4):
    """A small run of an objective alone: two updates, no KL."""
    config = METHODS["nft"](make_config(rollout={"steps": 4}))
    return replace(
        config,
        batch=BatchConfig(prompts=2, group_size=3, micro_batch=micro_batch),
        objective=ObjectiveSpec(kind="nft", old_decay=old_decay),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0, max_grad_norm=1e9),
        trust_region=TrustRegion(mode="none"),
        update=UpdateConfig(updates_per_rollout=2),
    )


@pytest.mark.usefixtures("in_double")
def test_micro_batches_are_a_matter_of_memory(make_config, make_trainer) -> None:
    found = []
    for micro_batch in (1, 2, 6):
        trainer = make_trainer(without_sde(make_config, micro_batch=micro_batch))
        rows = [trainer.step() for _ in range(2)]
        kinds = ("reward/", "loss/", "matching/", "gradient/")
        found.append({(at, name): row[name] for at, row in enumerate(rows) for name in row if name.startswith(kinds)})
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=CLOSE, abs=1e-12)


def test_the_old_policy_samples_and_the_newest_is_evaluated(make_config, make_trainer) -> None:
    trainer = make_trainer(without_sde(make_config, old_decay=0.9))
    start, seen, run = weights_of(trainer), [], trainer.model.velocity
    trainer.step()
    trainer.model.velocity = lambda *a, **k: (seen.append(weights_of(trainer)), run(*a, **k))[1]
    trainer.sample(plan_of(trainer, 1))
    live = weights_of(trainer)
    name = next(iter(live))
    torch.testing.assert_close(seen[0][name], 0.9 * start[name] + 0.1 * live[name])
    seen.clear()
    trainer.evaluate()
    assert torch.equal(seen[0][name], live[name])


def test_a_rank_encodes_only_the_prompts_that_it_samples(make_config) -> None:
    """Of two prompts with four clips each, two ranks have one each. (Held-out prompts are needed by all.)"""
    config = make_config(iterations=2)
    config = replace(config, data=replace(config.data, eval_prompts=None))
    seen: list[set[str]] = []
    for rank in range(2):
        world = World(rank=rank, size=2, layout=Layout(1, 2, 1))
        trainer, texts = assemble(config, build(config, world), world), set()
        encode = trainer.model.encode
        trainer.model.encode = lambda prompts, images=None, t=texts, e=encode: t.update(prompts) or e(prompts, images)
        trainer.encode_prompts()
        seen.append(set(texts))
        trainer.sample(plan_of(trainer))
        assert texts == seen[-1]
    assert [len(texts) for texts in seen] == [2, 2]
    assert len(seen[0] | seen[1]) == 4
