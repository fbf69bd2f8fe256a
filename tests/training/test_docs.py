"""The documents say what the code does: every option, every metric, and commands that parse."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import docs_options

import documents
import notebooks
import sage_grpo
from sage_grpo import api
from sage_grpo.configure import leaves, parse
from sage_grpo.recipes import recipe
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.telling.events import CheckpointEvent, EvaluationEvent, IterationEvent
from sage_grpo.training.config import OptimizerConfig, TrainConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_the_option_tables_are_those_of_the_code() -> None:
    assert docs_options.section() in docs_options.DOCUMENT.read_text(), "run: python tests/training/docs_options.py"


def test_every_metric_is_in_the_glossary(make_config, make_trainer) -> None:
    text = docs_options.DOCUMENT.read_text()
    known = set(re.findall(r"`([a-z]+/[\w/<>]+)`", text))
    # Parts and rewards stand for those of this run: "anything" would make every new metric pass for one.
    stands_for = {"NNN": r"\d{3}", "<part>": "bright", "<reward>": "bright", "<phase>": r"\w+"}
    patterns = []
    for name in map(re.escape, known):
        for placeholder, meaning in stands_for.items():
            name = name.replace(placeholder, meaning)
        patterns.append(re.compile(name))
    trainer = make_trainer(
        make_config(optimizer=OptimizerConfig(ema=0.9, target_kl=0.1), trust_region=TrustRegion(mode="dual"))
    )
    for name in {**trainer.evaluate().metrics, **trainer.step()}:
        assert any(pattern.fullmatch(name) for pattern in patterns), f"docs/config.md does not explain {name}"


def test_the_official_command_is_the_official_run() -> None:
    (block,) = [block for block in documents.blocks("bash") if block.page == "docs/from-official.md"]
    (words,) = documents.commands(block)
    argv = words[words.index("train") + 1 :]
    config = parse(TrainConfig, argv[2:], prog="train", defaults=recipe(argv[1]))
    assert config.batch.prompts * config.batch.group_size == 2 * (8 // 2)  # batch_size x dp_degree
    assert (config.parallel.sp, config.iterations, config.optimizer.lr) == (2, 10000, 1e-5)
    assert config.optimizer.kind == "muon"
    assert (config.trust_region.mode, config.anchor.every, config.anchor.offload) == ("dual", 10, True)


RELEASED = {
    "enable_fsdp": "True",
    "enable_gradient_checkpointing": "True",
    "use_muon": "True",
    "sp_size": "8 (scripts: 2)",
}
RELEASED |= {"validate_at_step0": "False", "reward_weights": "VQ 0.5, MQ 0.5, TA 1", "validation_fixed_size": "480x864"}


def test_the_defaults_of_the_released_code_are_stated_as_they_are() -> None:
    rows = [
        line.split("|")[1:3] for line in (DOCS / "from-official.md").read_text().splitlines() if line.startswith("| `")
    ]
    stated = {name.strip(" `"): default.strip() for name, default in rows}
    assert RELEASED.items() <= stated.items()


def test_where_sage_exact_is_named_its_publication_is_cited() -> None:
    root = DOCS.parent
    from sage_grpo.flow.kernels import SageExact
    from sage_grpo.recipes.methods import sage_exact

    for text in (SageExact.__doc__, sage_exact.__doc__):
        assert "2605.23522" in (text or "")
    for document in ("docs/recipes.md", "CHANGELOG.md", "docs/method.md", "docs/from-official.md", "docs/config.md"):
        assert "2605.23522" in (root / document).read_text(), document


def test_nothing_is_promised_that_does_not_hold() -> None:
    """Nothing is published in a registry, and not every checkpoint of the world is supported."""
    for path in documents.PAGES:
        text = path.read_text()
        assert "pip install sage-grpo" not in text, path
        assert not re.search(r"any (sampler, LoRA or )?checkpoint\b", text), path


def test_every_recipe_that_the_documents_name_exists() -> None:
    targets = "|".join(("shapes", "scenes", "wan", "wan22", "ltx2", "hunyuan15", "hunyuan15_lora"))
    for path in documents.PAGES:
        for name in re.findall(rf"`((?:{targets})(?:/\w+)+)`", path.read_text()):
            recipe(name)


def test_every_option_that_the_documents_name_exists() -> None:
    keys = {key for key, _ in leaves(TrainConfig)}
    sections = {key.split(".")[0] for key in keys if "." in key}
    for document in ("from-official.md", "config.md"):
        text = (DOCS / document).read_text().split(docs_options.BEGIN)[0]
        names = re.findall(r"`(?:--)?([a-z_]+\.[a-z_.]+)[` ]", text)
        names = [n for n in names if n.split(".")[0] in sections and not n.endswith((".yaml", ".jsonl", ".md"))]
        assert len(names) > 10  # the pattern still finds them
        for name in names:
            assert name in keys, f"{document} names {name}"


OFFICIAL = (
    "sp_size batch_size num_generations learning_rate max_steps sde_type use_grad_balancing enable_timestep_permutation "
    "kl_weight kl_coef kl_min_coef use_moving_KL update_ref_model_step use_dual_kl dual_kl_moving_weight "
    "dual_kl_step_weight validate_at_step0 validate_video_length validation_timestep_shift reference_mode_offload "
    "pretrained_model_root output_dir enable_fsdp enable_gradient_checkpointing world_size dp_degree"
)


def test_every_official_parameter_is_mapped() -> None:
    rows = [line for line in (DOCS / "from-official.md").read_text().splitlines() if line.startswith("| `")]
    for name in OFFICIAL.split():
        assert any(re.search(rf"\b{name}\b", row.split("|")[1]) for row in rows), name


def test_the_guide_to_the_api_names_what_there_is() -> None:
    text = (DOCS / "api.md").read_text()
    notebook = "".join("".join(cell["source"]) for cell in notebooks.read(notebooks.NOTEBOOKS[0])["cells"])
    used = set(re.findall(r"\bsage\.([a-zA-Z_]+)", text + notebook))
    assert used >= {"train", "evaluate", "generate", "recipe", "own_reward", "StopRequest"}
    assert used <= set(sage_grpo.__all__)
    for name in inspect.signature(api.train).parameters:
        assert f"`{name}`" in text or name == "config", f"docs/api.md does not explain {name}"
    for record in (IterationEvent, EvaluationEvent, CheckpointEvent, api.TrainResult):
        for field in dataclasses.fields(record):
            assert f"`{field.name}`" in text, f"docs/api.md does not explain {record.__name__}.{field.name}"


def test_ten_lines_are_ten_lines() -> None:
    block = re.findall(r"```python\n(.*?)```", (DOCS / "api.md").read_text(), flags=re.DOTALL)[0]
    compile(block, "docs/api.md", "exec")
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
