"""What can be refused without weights is refused before any are loaded; what the terminal says fits it."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import pytest
import torch

from sage_grpo.cli import main
from sage_grpo.clips.evaluate import EvaluateSpec, measure
from sage_grpo.flow.windows import Window
from sage_grpo.models import ModelError
from sage_grpo.recipes import names, recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.session.preflight import check_plan, needs, preflight
from sage_grpo.telling.terminal import Terminal, iteration_line, lines_of, model_rows
from sage_grpo.training.config import EvalConfig

ROW = {
    "reward/total": 1.175, "reward/group_std": 0.256, "kl/total": 6.7e-4, "ratio/clip_fraction": 0.12,
    "gradient/norm": 1.19, "time/total": 17.9,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sage_grpo.models.spec.ModelSpec.load", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.parametrize("name", names())
def test_every_recipe_has_a_plan_that_works(name: str) -> None:
    check_plan(recipe(name))


def test_plans_that_cannot_work_are_refused_before_a_model_is_loaded(tmp_path) -> None:
    from sage_grpo.commands.train import run

    config = dataclasses.replace(recipe("shapes/sage"), out=str(tmp_path / "run"))
    for change, said in (
        ({"kernel": dataclasses.replace(config.kernel, name="ode")}, "No step of the rollout can be trained"),
        ({"update": dataclasses.replace(config.update, updates_per_rollout=9)}, "9"),
        (
            {"rollout": dataclasses.replace(config.rollout, window=Window(kind="drawn", at=[5]))},
            "window.at names step 5",
        ),
        ({"rewards": []}, "rewards: none of them counts"),
        ({"rewards": [RewardSpec(name="no_such_thing:reward")]}, "there is no module no_such_thing"),
        ({"model": dataclasses.replace(config.model, device="cud")}, 'no device "cud"'),
        ({"model": dataclasses.replace(config.model, family="os.path")}, "no function load"),
    ):
        with pytest.raises(ValueError, match=said):
            run(dataclasses.replace(config, **change))
    assert not (tmp_path / "run").exists()


def test_rollouts_that_do_not_divide_over_the_ranks_are_refused_before_a_model_is_loaded() -> None:
    config = recipe("shapes/sage")
    with pytest.raises(ValueError, match="49"):
        preflight(config, ranks=49)
    preflight(config, ranks=4)


def test_a_folder_that_is_no_checkpoint_is_refused_before_rewards_are_loaded(tmp_path) -> None:
    config = recipe("shapes/sage")
    (tmp_path / "file.txt").write_text("x")
    for path, said in ((tmp_path, "model_index.json"), (tmp_path / "file.txt", "is a file")):
        with pytest.raises(ModelError, match=said):
            preflight(dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(path))))


def test_what_is_here_is_not_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = recipe("hunyuan15_lora")
    assert [need.key for need in needs(config)] == [
        "data.prompts", "data.eval_prompts", "model.path", "rewards videoalign: checkpoint", "rewards videoalign: base",
        "rewards videoalign: template",
    ]  # fmt: skip
    assert not any(need.is_here for need in needs(config))
    for need in needs(config):
        (tmp_path / need.value).mkdir(parents=True)
    assert all(need.is_here for need in needs(config))
    assert [need.key for need in needs(recipe("shapes/sage"))] == []


def test_a_line_an_iteration_also_on_a_terminal_with_bars(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    terminal = Terminal(enabled=True, progress=True, total=9)
    terminal.console.file = stream
    for number in (1, 2):
        terminal.iteration(number, ROW)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith(("1/9", "2/9"))]
    assert lines == [
        "1/9  reward 1.175 ± 0.256  kl 6.7e-04  clip 12%  grad 1.2  17.9 s  2 min left",
        "2/9  reward 1.175 ± 0.256  kl 6.7e-04  clip 12%  grad 1.2  17.9 s  2 min left",
    ]


def test_lines_fit_80_columns_whatever_the_figures() -> None:
    row = {
        **ROW,
        "reward/total": -1234.567,
        "reward/group_std": 1234.567,
        "gradient/norm": 123456.0,
        "time/total": 12345.6,
    }
    line = iteration_line(99999, 100000, row, left=1e8)
    assert len(line) <= 80
    assert "reward -1234.567" in line
    assert "left" in line
    parts = [f"reward_{number} 0.123" for number in range(20)]
    lines = lines_of(["held-out after 3", *parts])
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split() == " ".join(["held-out after 3", *parts]).split()


def test_the_start_names_model_device_precision_and_what_is_trained() -> None:
    rows = dict(model_rows(recipe("hunyuan15_lora"), "cuda:0", 1234567))
    assert rows == {
        "model": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        "device": "cuda:0, computes in bfloat16",
        "trains": "1,234,567 parameters: a LoRA of rank 32",
    }
    assert "all weights" in dict(model_rows(recipe("shapes/sage"), "cpu", 5))["trains"]


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path, monkeypatch, capsys) -> None:
    """Scores that are called held-out are not, and nothing else would say so."""
    (tmp_path / "train.txt").write_text("a cat\na dog\na bird\n")
    (tmp_path / "apart.txt").write_text("a tree\nthe sea\n")
    (tmp_path / "mixed.txt").write_text("a tree\na dog\n")
    config = recipe("shapes/sage")
    config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, prompts=2))

    def remarks(name: str) -> list[str]:
        files = {"prompts": str(tmp_path / "train.txt"), "eval_prompts": str(tmp_path / name)}
        return preflight(dataclasses.replace(config, data=dataclasses.replace(config.data, **files)))

    assert remarks("apart.txt") == []
    assert [text.partition(":")[0] for text in remarks("mixed.txt")] == [
        "1 of 2 held-out prompts are trained on as well"
    ]
    monkeypatch.setattr("sage_grpo.session.run", lambda config, world: None)
    words = ["--data.prompts", str(tmp_path / "train.txt"), "--data.eval_prompts", str(tmp_path / "mixed.txt")]
    assert main(["train", "shapes/sage", "--out", str(tmp_path / "run"), *words]) == 0
    assert "sage-grpo: 1 of 2 held-out prompts are trained on as well" in capsys.readouterr().err


def test_more_evaluation_prompts_than_there_are_is_told_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a cat\na dog\n")
    (tmp_path / "held.txt").write_text("a tree\nthe sea\na hill\n")
    config = recipe("shapes/sage")
    data = dataclasses.replace(
        config.data, prompts=str(tmp_path / "train.txt"), eval_prompts=str(tmp_path / "held.txt")
    )

    def remarks(asked: int) -> list[str]:
        evaluate = dataclasses.replace(config.evaluate, prompts=asked)
        return preflight(dataclasses.replace(config, data=data, evaluate=evaluate))

    (told,) = remarks(16)
    assert "asks for 16 prompts" in told
    assert "only 3" in told
    assert remarks(3) == []


@pytest.mark.parametrize(
    ("dtype", "device", "told"), [("bfloat16", "cpu", True), ("float32", "cpu", False), ("bfloat16", "cuda", False)]
)
def test_bfloat16_on_a_cpu_is_told_before_it_takes_hours(
    dtype: str, device: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[preflight.__module__], "choose_device", torch.device)
    config = recipe("shapes/sage")
    model = dataclasses.replace(config.model, dtype=dtype, device=device)
    remarks = preflight(dataclasses.replace(config, model=model))
    assert [text for text in remarks if "bfloat16 is hundreds of times slower" in text] == remarks
    assert len(remarks) == told


def test_evaluate_tells_it_too(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("a large red circle moves right quickly on a white background\n")
    settings = EvalConfig(prompts=2, steps=1)
    options = EvaluateSpec(prompts=str(tmp_path / "held.txt"), settings=settings, rewards=[RewardSpec(name="none")])
    told = r"settings.prompts asks for 2 prompts to evaluate on, but there are only 1"
    with pytest.warns(UserWarning, match=told), pytest.raises(ValueError, match="Unknown reward"):
        measure(options)


def test_how_much_noise_a_step_holds_is_left_to_the_models_grid() -> None:
    """Preflight knows no grid but an even one, where dance would hold too much before its last step."""
    config = recipe("shapes/dance_grpo")
    rollout = dataclasses.replace(config.rollout, steps=20, window=Window(kind="fixed", start=18, length=1))
    kernel = dataclasses.replace(config.kernel, eta=0.5)
    update = dataclasses.replace(config.update, updates_per_rollout=1)
    config = dataclasses.replace(config, rollout=rollout, kernel=kernel, update=update)
    check_plan(config)
    with pytest.raises(ValueError, match="No step of the rollout can be trained"):
        check_plan(
            dataclasses.replace(
                config, rollout=dataclasses.replace(rollout, window=Window(kind="fixed", start=19, length=1))
            )
        )
