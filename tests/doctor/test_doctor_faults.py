"""Faults planted on purpose, one at a time: the check-up names each; without it the same check passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from sage_grpo.data.prompts import Prompt
from sage_grpo.models import ModelError, lora
from sage_grpo.models.checkpoints.checkpoint import load_pipeline
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.plan.architecture import Architecture
from sage_grpo.plan.description import describe
from sage_grpo.recipes import recipe
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.preflight import preflight, prompt_remarks
from sage_grpo.run.session import assemble
from sage_grpo.samplers import kernels
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.tools.doctor import DoctorSpec, checkpoint, examine, learning, machine
from sage_grpo.tools.doctor.check import Check
from sage_grpo.tools.doctor.learning import Sample
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.training.inputs import build
from sage_grpo.training.planner import Planner
from sage_grpo.training.reference import ReferencePolicy
from sage_grpo.training.rollout import Storage
from sage_grpo.training.trainer import Trainer
from trainer_zoo.toy import ToyModel

SMALL = DoctorSpec(prompts=2, members=2)
EXACT = KernelSpec(name="sage_exact", eta=0.7)


@pytest.fixture
def sample(make_config) -> Callable[..., Sample]:
    """A plan on a tiny HunyuanVideo-1.5 with guidance and a LoRA, or on what the fields say."""

    def make(**fields: Any) -> Sample:
        size = {"frames": 5, "height": 32, "width": 32}
        model = {"guidance_scale": 3.0, "lora": LoraSpec(rank=2), **size} | fields.pop("model", {})
        chosen = {"kind": "hunyuan15_t2v", "kernel": EXACT, "model": model, "rollout": {"steps": 3}} | fields
        if chosen["kind"] == "toy":
            chosen["model"] = {}
        config = make_config(**chosen)
        return examine.prepare(assemble(examine.small(config, SMALL), build(config)))

    return make


def status(finding: Check, name: str) -> str:
    assert finding.name == name
    return finding.status


def named(findings: Iterator[Check], name: str) -> str:
    return next(finding.status for finding in findings if finding.name == name)


def test_noise_in_the_last_step(make_config, monkeypatch) -> None:
    def stability(**rollout: Any) -> Check:
        config = make_config(kernel=KernelSpec(name="sage"), rollout={"steps": 3} | rollout)
        run = describe(config, architecture=Architecture.of(build(config).model, "toy"))  # type: ignore[arg-type]
        (found,) = examine.of_schedule(run)
        return found

    assert status(stability(), "stability") == "pass"
    assert status(stability(deterministic_last=False), "stability") == "warn"
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "unexplored", lambda planner: "step 1 is deterministic, too")
        assert stability().value.endswith("step 1 is deterministic, too")
    monkeypatch.setattr(kernels.Sage, "leaves_noise", False)
    assert status(stability(), "stability") == "warn"


def test_nothing_to_train_ends_the_check_up(make_config, monkeypatch) -> None:
    monkeypatch.setattr(ToyModel, "trainable", lambda model: {})
    found = examine.examine(make_config(), SMALL)
    assert status(found[-1], "gradients") == "fail"  # and nothing after it


def test_replay_of_what_was_not_sampled(sample, monkeypatch) -> None:
    stored = {"kind": "toy", "rollout": {"steps": 3, "storage": "bfloat16"}}
    healthy = sample(**stored)
    assert status(learning.ratio(healthy, healthy.items()), "ratio") == "pass"
    monkeypatch.setattr(Storage, "rounded", lambda self, x: x)
    rounded = sample(**stored)
    assert status(learning.ratio(rounded, rounded.items()), "ratio") != "pass"


def _after_ratio(sample: Sample) -> Trainer:
    learning.ratio(sample, sample.items())
    return sample.trainer


def test_kl_without_a_gradient(sample, monkeypatch) -> None:
    region = {"trust_region": TrustRegion(mode="dual", beta_velocity=0.0), "kind": "toy"}
    healthy = sample(**region)
    learning.update_moves(_after_ratio(healthy))
    assert status(learning.trust_region(healthy, healthy.items()), "trust region") == "pass"
    monkeypatch.setattr(
        ReferencePolicy, "applied", lambda self: nullcontext()
    )  # the reference pass runs with the live weights
    other = sample(**region)
    learning.update_moves(_after_ratio(other))
    assert status(learning.trust_region(other, other.items()), "trust region") == "fail"


def _saved(sample: Sample) -> Check:
    model = sample.trainer.model
    with torch.no_grad():
        for p in sample.trainer.state.params.values():
            p.add_(0.1)  # an adapter at its start would be lost unseen
    return checkpoint.save(sample.trainer, checkpoint.start(model), model.encode(["a cat"]))


@pytest.mark.parametrize(("by", "ended"), [(0.0, "pass"), (1.0, "fail")])
def test_a_saved_model_is_loaded_and_compared_at_one_level(by: float, ended: str, monkeypatch) -> None:
    def model(by: float) -> Any:
        def velocity(x: Tensor, sigma: Tensor, conditions: Any, guidance: float) -> Tensor:
            assert (x.shape, sigma, conditions, guidance) == ((1, 3), checkpoint.MIDDLE, ["a"], 1.0)
            return x + by

        network = torch.nn.Linear(2, 2)
        return SimpleNamespace(velocity=velocity, network=network, spec=ModelSpec(), device="cpu", dtype=torch.float32)

    monkeypatch.setattr(checkpoint, "FamilyModel", SimpleNamespace)
    monkeypatch.setattr(
        ModelSpec, "load", lambda spec, device: model(9.0 if spec.compile or not Path(spec.path).is_dir() else by)
    )
    trainer: Any = SimpleNamespace(model=model(0.0), export=lambda folder: None, world=SimpleNamespace(control=None))
    assert checkpoint.save(trainer, torch.ones(2, 3), ["a", "b"]).status == ended  # type: ignore[list-item]
    monkeypatch.setattr(checkpoint, "SMALL", 23)  # bytes; the network has 24
    assert checkpoint.save(trainer, torch.ones(2, 3), []).status == "skip"


@pytest.mark.slow
def test_weights_that_do_not_survive_saving(sample, monkeypatch) -> None:
    assert status(_saved(sample()), "save") == "pass"
    true = lora.save_lora

    def lossy(folder: Path, network: Any, weights: dict[str, Tensor], expert: Any = None) -> None:
        true(folder, network, {name: 0.5 * tensor for name, tensor in weights.items()}, expert)

    monkeypatch.setattr(lora, "save_lora", lossy)
    assert status(_saved(sample()), "save") == "fail"


# The reward ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clips() -> tuple[Sample, Tensor]:
    config = recipe("shapes/sage")
    sample = examine.prepare(assemble(examine.small(config, DoctorSpec()), build(config)))
    sample.trainer.encode_prompts()
    return sample, sample.trainer.engine.decode(sample.rollout)


def _findings(clips: tuple[Sample, Tensor], name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Check]:
    sample, videos = clips
    chosen = CompositeReward([RewardSpec(name=f"doctor_rewards:{name}", batch_size=0)])
    for owner in (sample.trainer, sample.trainer.engine):
        monkeypatch.setattr(owner, "reward", chosen)
    return {finding.name: finding for finding in examine.of_reward(sample, videos)}


@pytest.mark.slow
def test_rewards_of_a_rollout(clips, monkeypatch) -> None:
    found = _findings(clips, "judged", monkeypatch)
    assert {finding.status for finding in found.values()} == {"pass"}
    assert len(found) == 5
    assert _findings(clips, "luma", monkeypatch)["reward statistics"].status in ("warn", "fail")
    assert _findings(clips, "broken", monkeypatch)["reward valid"].status == "fail"


@pytest.mark.slow
def test_a_reward_that_no_prompt_names_is_no_fault(clips, monkeypatch) -> None:
    sample, videos = clips
    specs = [RewardSpec(name=f"doctor_rewards:{name}", batch_size=0) for name in ("judged", "luma")]
    groups = (replace(one, prompt=replace(one.prompt, rewards=("judged",))) for one in sample.plan.groups)
    routed = Sample(sample.trainer, replace(sample.plan, groups=tuple(groups)))
    monkeypatch.setattr(sample.trainer, "reward", CompositeReward(specs))
    monkeypatch.setattr(sample.trainer.engine, "reward", sample.trainer.reward)
    vars(routed)["rollout"] = sample.rollout
    assert {finding.status for finding in examine.of_reward(routed, videos)} == {"pass"}


@pytest.mark.slow
def test_exploring_too_much_is_not_answered_with_more(clips, monkeypatch) -> None:
    sample, _ = clips
    kernel = KernelSpec(name="sage", eta=3.0)
    monkeypatch.setattr(sample.trainer, "config", replace(sample.trainer.config, kernel=kernel))
    monkeypatch.setattr(sample.trainer, "planner", replace(sample.trainer.planner, kernel=kernel.build()))
    assert "lower kernel.eta (3)" in _findings(clips, "constant", monkeypatch)["reward spread"].remedy


@pytest.mark.slow
def test_trainer_that_hands_over_the_wrong_prompts(clips, monkeypatch) -> None:
    sample, videos = clips
    score = RolloutEngine.score

    def rolled(self: RolloutEngine, videos: Tensor, plan: Any, **given: Any) -> Any:
        groups = [replace(group, prompt=plan.groups[group.index - 1].prompt) for group in plan.groups]
        return score(self, videos, replace(plan, groups=tuple(groups)), **given)

    monkeypatch.setattr(RolloutEngine, "score", rolled)
    found = {finding.name: finding for finding in examine.of_reward(sample, videos)}
    assert found["reward prompt"].status == "fail"


# The machine and its files ------------------------------------------------------------------------------------------


def test_incomplete_checkpoint(make_config, checkpoint, tmp_path) -> None:
    config, folder = make_config(kind="hunyuan15_t2v"), tmp_path / "copy"
    shutil.copytree(checkpoint("hunyuan15_t2v"), folder)
    config = replace(config, model=replace(config.model, path=str(folder)))
    (folder / "tokenizer" / "config.json").write_text("{}")  # which some have, and weights none
    assert status(machine.files(config)[0], "files") == "pass"
    for name in ("vocab.json", "tokenizer.json"):
        (folder / "tokenizer" / name).unlink(missing_ok=True)
    found = examine.examine(config, SMALL)
    assert status(found[-1], "files") == "fail"
    assert "tokenizer" in found[-1].value


def test_a_branch_after_the_last_step() -> None:
    config = replace(recipe("wan/branch"), rollout=replace(recipe("wan/branch").rollout, steps=6))
    found = examine.examine(config, SMALL)
    assert status(found[-1], "plan") == "fail"
    assert "rollout.window.at names step 6, but with rollout.steps 6 it may be 0, 1, 2, 3, 4" in found[-1].value


def test_a_text_encoder_that_was_cut_short(make_config, checkpoint, tmp_path) -> None:
    """Its header is whole, so that nothing else notices before a prompt is encoded."""
    folder = shutil.copytree(checkpoint("hunyuan15_t2v"), tmp_path / "copy")
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4])
    config = make_config(kind="hunyuan15_t2v")
    config = replace(config, model=replace(config.model, path=str(folder)))
    found = examine.examine(config, SMALL)
    assert status(found[-1], "files") == "fail"
    assert str(file) in found[-1].value
    with pytest.raises(ModelError, match="cut short"):
        preflight(config)
    with pytest.raises(ModelError, match="cut short"):  # as generate loads it
        load_pipeline(object, folder, skip=("text_encoder",), dtypes={})


def test_a_file_that_breaks_later_is_a_finding(make_config, monkeypatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise SafetensorError("incomplete metadata")

    monkeypatch.setattr(examine, "build", broken)
    found = examine.examine(make_config(), SMALL)
    assert status(found[-1], "loading") == "fail"


def test_prompts_that_are_not_apart() -> None:
    def remarks(training: str, held_out: str) -> list[str]:
        return prompt_remarks(*([Prompt(text) for text in texts.split("/")] for texts in (training, held_out)))

    assert not remarks("a cat/a dog", "a tree/the sea")
    for training, held_out, text in (
        ("a cat/a dog", "a tree/A  Dog", "1 of 2 held-out prompts are trained on"),
        ("a cat/a dog/a cat", "a tree", "1 of 3 training prompts are copies"),
        ("a cat", "a tree/the sea/the sea /the sea", "2 of 4 held-out prompts are copies"),
    ):
        assert text in " ".join(remarks(training, held_out))
        assert text in machine.settings(describe(recipe("shapes/sage")), remarks(training, held_out)).value
    seeds = [Prompt("a cat", seed=1), Prompt("a cat", seed=2)]
    assert not prompt_remarks(seeds, []), "one prompt from two noises is two tasks"
    assert not prompt_remarks([Prompt("a cat", rewards=(name,)) for name in ("clip", "ocr")], [])
    assert machine.settings(describe(recipe("shapes/sage")), []).status == "pass"
