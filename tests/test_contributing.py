"""CONTRIBUTING.md says which files a new kernel, reward, recipe, family and observer touch: here they are added in a copy of the package.

What a field touches is in training/test_new_field.py; kernels and sinks that stay outside of the package are in session/test_own_code.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "src" / "sage_grpo"
GUIDE = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")

KERNEL = '''@dataclass(frozen=True)
class Gentle:
    """Dance's step with half of its noise."""

    leaves_noise: ClassVar[bool] = True
    eta: NotNegative = 0.5

    def __call__(self, sigma: Sigma, sigma_next: Sigma) -> Transition:
        return Dance(eta=self.eta / 2)(sigma, sigma_next)


'''
REWARD = '''"""How red clips are."""

from sage_grpo.types import RewardFacts


class Warmth:
    """The mean of the red channel."""

    facts = RewardFacts(what="how red a clip is", parts="warmth")
    names = ("warmth",)

    def __call__(self, videos, prompts, fps):
        return {"warmth": videos[..., 0].float().mean(dim=(1, 2, 3)) / 255}
'''
RECIPE = '''def gentle_grpo(config: TrainConfig) -> TrainConfig:
    """A method with a kernel of its own."""
    return replace(_baseline(config, "gentle", region="none"), advantage=AdvantageConfig(scale="global"))


'''
OBSERVER = '''@dataclass(frozen=True)
class Diarist(Observer):
    """Counts iterations in a file."""

    trainer: Trainer

    def after(self, row: dict[str, float]) -> None:
        """One more."""
        with (Path(self.trainer.config.out) / "counted.txt").open("a") as file:
            file.write(f"{self.trainer.state.iteration} {row['reward/warmth'] > 0}\\n")


'''
CHANGES = {
    "kernel": {
        "flow/kernels.py": [
            ("KernelName = Literal[", KERNEL + "KernelName = Literal["),
            ('"sage_exact"]', '"sage_exact", "gentle"]'),
            ("Cps | SageExact]", "Cps | SageExact | Gentle]"),
            ("Cps, SageExact)", "Cps, SageExact, Gentle)"),
        ]
    },
    "reward": {
        "rewards/built_in/warmth.py": [("", REWARD)],
        "rewards/spec.py": [
            ('    "ocr": ', '    "warmth": "sage_grpo.rewards.built_in.warmth:Warmth",\n    "ocr": '),
        ],
    },
    "recipe": {
        "recipes/methods.py": [
            ("METHODS: dict[", RECIPE + "METHODS: dict["),
            ("nft, awm, dpo, rft, refl, draft, adjoint,\n", "nft, awm, gentle_grpo,\n"),
        ]
    },
    "family": {
        "models/families/toy.py": [("", (TESTS / "trainer_zoo" / "toy.py").read_text(encoding="utf-8"))],
        "models/spec.py": [('"z_image",\n', '"z_image",\n    "toy",\n')],
        "models/checkpoints/checkpoint.py": [
            ('    "QwenImagePipeline": ', '    "ToyPipeline": "toy",\n    "QwenImagePipeline": '),
        ],
    },
    "observer": {
        "telling/observers.py": [
            ("def observers_of(", OBSERVER + "def observers_of("),
            (
                "        Callbacks(trainer, hooks, saver),\n",
                "        Callbacks(trainer, hooks, saver),\n        Diarist(trainer),\n",
            ),
        ]
    },
}
"""What is added -> file -> what is found there once, and what stands there instead; a new file begins with nothing."""
ASKED = """
import json, sys
from dataclasses import replace
from pathlib import Path

from sage_grpo.commands import completion
from sage_grpo.configure import parse
from sage_grpo.folder.journal import read_rows
from sage_grpo.models.checkpoints.checkpoint import detect_family
from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes import names, recipe
from sage_grpo.session import run
from sage_grpo.session.preflight import preflight
from sage_grpo.training.config import TrainConfig

folder = Path(sys.argv[1])
(folder / "prompts.txt").write_text("a cat\\na dog\\n")
checkpoint = folder / "checkpoint"
checkpoint.mkdir()
(checkpoint / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))
words = ["--model.family", "toy", "--model.path", "null", "--rewards", json.dumps([{"name": "warmth"}])]
words += ["--data.prompts", str(folder / "prompts.txt"), "--data.eval_prompts", "null", "--iterations", "2"]
words += ["--out", str(folder / "run"), "--batch.prompts", "2", "--batch.group_size", "2", "--rollout.steps", "4"]
words += ["--log.tensorboard", "false", "--keep.videos_every", "0", "--log.progress", "false"]
config = parse(TrainConfig, words, prog="x", defaults=recipe("shapes/gentle_grpo"))
preflight(config)
ended = run(config, quiet=True)
offered = completion.words()
print("ANSWER" + json.dumps({
    "recipes": [name for name in names() if name.endswith("/gentle_grpo")],
    "kernel": config.kernel.name,
    "kernels": offered["train"]["--kernel.name"],
    "family": detect_family(ModelSpec(path=str(checkpoint))),
    "iterations": ended.iteration,
    "rows": [{k: row[k] for k in ("reward/warmth", "ratio/first_log")} for row in read_rows(folder / "run" / "metrics.jsonl")],
    "counted": (folder / "run" / "counted.txt").read_text().splitlines(),
}))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the package answers once all of this is added."""
    root = tmp_path_factory.mktemp("copy")

    def copy(source: str, target: str) -> None:
        shutil.copy(source, target) if source.endswith(".py") else os.symlink(source, target)

    shutil.copytree(PACKAGE, root / "sage_grpo", copy_function=copy, ignore=shutil.ignore_patterns("__pycache__"))
    for changes in CHANGES.values():
        for name, replaced in changes.items():
            file = root / "sage_grpo" / name
            for before, after in replaced:
                text = file.read_text(encoding="utf-8") if before else ""
                assert not before or text.count(before) == 1, (
                    f"{name}: {before!r} stands there {text.count(before)} times"
                )
                file.write_text(text.replace(before, after) if before else after, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(root)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.partition("ANSWER")[2]))


@pytest.mark.slow
def test_a_kernel_is_a_class_and_its_name(answer: dict[str, Any]) -> None:
    assert "gentle" in answer["kernels"]
    assert [row["ratio/first_log"] for row in answer["rows"]] == [0.0, 0.0]


@pytest.mark.slow
def test_a_reward_is_a_class_with_its_facts_and_its_name(answer: dict[str, Any]) -> None:
    assert all(0 < row["reward/warmth"] < 1 for row in answer["rows"])


@pytest.mark.slow
def test_a_recipe_is_a_function_and_works_for_every_target(answer: dict[str, Any]) -> None:
    assert len(answer["recipes"]) > 3
    assert "shapes/gentle_grpo" in answer["recipes"]
    assert answer["kernel"] == "gentle"


@pytest.mark.slow
def test_a_family_is_a_module_and_the_pipeline_that_it_serves(answer: dict[str, Any]) -> None:
    assert answer["family"] == "toy"
    assert answer["iterations"] == 2


@pytest.mark.slow
def test_an_observer_is_a_class_and_its_place_in_the_order(answer: dict[str, Any]) -> None:
    assert answer["counted"] == ["1 True", "2 True"]


@pytest.mark.parametrize("kind", [*CHANGES, "field"])
def test_the_guide_names_the_files_that_this_test_touches(kind: str) -> None:
    row = re.search(rf"^\| (?:a|an) {kind} \|(.*)\|$", GUIDE, flags=re.MULTILINE)
    assert row is not None, f"CONTRIBUTING.md has no row for a {kind}"
    named = re.findall(r"`((?:\w+/)+[\w.]*)`", row[1])
    for name in CHANGES.get(kind, {}):
        generic = re.sub(r"(built_in|families)/\w+\.py", r"\1", name)
        assert any(one.startswith(generic) or one == name for one in named), (
            f"CONTRIBUTING.md, {kind}: {name} is not there"
        )
    for name in named:
        assert any((folder / name.rstrip("/")).exists() for folder in (PACKAGE, TESTS, TESTS.parent)), f"no {name}"
