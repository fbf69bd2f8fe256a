"""The second world uses the package as a stranger's does: prompt files, a reward by import path, a model folder, a recipe file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import world_laws as laws
from research.scenes.world import MODEL, SCENES
from sage_grpo.cli import train
from sage_grpo.cli.starting import from_recipe
from sage_grpo.config.parsing import parse
from sage_grpo.run.preflight import check_files
from sage_grpo.training.inputs import load_sources
from sage_grpo.worlds.world import world_of_prompts

ROOT = Path(__file__).parents[2]


def test_prompts_are_different_scenes_of_their_split_and_always_the_same() -> None:
    laws.prompts_are_different_scenes_of_their_split_and_always_the_same(SCENES)


def test_a_prompt_names_the_scene_that_made_it_in_every_template() -> None:
    laws.a_prompt_names_the_scene_that_made_it_in_every_template(SCENES)


def test_the_package_does_not_know_it() -> None:
    assert world_of_prompts(SCENES.texts("heldout")[:3]) is None


def test_the_model_is_small_and_holds_safetensors_only() -> None:
    laws.is_a_small_folder(MODEL, 40e6)


def options_of(*words: str) -> Any:
    """The options of `sage-grpo train` with these words."""
    defaults, argv = from_recipe(train.Options, ["--recipe", *words])
    return parse(train.Options, argv, prog="train", defaults=defaults, recipes=True)


@pytest.mark.parametrize("method", ["branch", "sage"])
def test_the_recipe_files_train_what_they_name(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = options_of(f"research/scenes/{method}.yaml")
    check_files(options)
    assert options.out == f"runs/scenes-{method}"
    assert [reward.name for reward in options.rewards] == ["research.scenes.judge:ScenesJudge"]
    train_prompts, held_out = load_sources(options)
    assert not {one.text for one in train_prompts} & {one.text for one in held_out}


@pytest.mark.slow
def test_one_iteration_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    small = (
        "--iterations=1",
        "--batch.prompts=1",
        "--batch.group_size=2",
        "--rollout.steps=2",
        "--evaluate.prompts=1",
        "--evaluate.steps=1",
    )
    assert train.run(options_of("research/scenes/branch.yaml", *small, f"--out={tmp_path / 'run'}")) == 0
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
