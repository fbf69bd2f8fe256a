"""The side-by-side benchmark at a tiny size: its plumbing does not rot, and its arithmetic is right."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STAND_INS = ("datasets", "imageio", "ftfy")
FOLDER = Path(__file__).parents[2] / "benchmarks" / "side_by_side"


@pytest.fixture(scope="module")
def modules() -> Iterator[None]:
    """The benchmark's files are scripts beside one another."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if Path(getattr(module, "__file__", None) or "").parent == FOLDER or name.split(".")[0] in STAND_INS:
            del sys.modules[name]


@pytest.fixture(scope="module")
def lines(modules: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Ours and stock diffusers on both models, in this process."""
    import job
    import run
    import unit

    folder = tmp_path_factory.mktemp("side_by_side")
    arguments = ["--tiny", "--out", str(folder / "out.jsonl"), "--level", "2", "--variants", "ours,stock"]
    arguments += ["--set", "optimizer.lr=3e-4", "--repeats", "2"]
    small = dataclasses.asdict(job.TINY.warmup())
    return run.measure(run.parse(arguments), folder, lambda each, seconds: unit.run({**each, "job": small}))


@pytest.mark.slow
def test_all_variants_do_the_same_work(lines: list[dict[str, Any]]) -> None:
    from table import render

    assert [(line["model"], line["variant"], line["status"]) for line in lines] == [
        ("wan", "ours", "ok"),
        ("hunyuan15", "ours", "ok"),
        ("wan", "stock", "ok"),
        ("hunyuan15", "stock", "ok"),
    ]
    for model in ("wan", "hunyuan15"):
        own = [line for line in lines if line["model"] == model]
        assert len({line["lora"]["parameters"] for line in own}) == 1
        assert all(line["passes"]["training_pass"]["seconds"] > 0 for line in own)
    (ours,) = (line for line in lines if "timed" in line)
    assert ours["timed"]["forwards"] == {"rollout": 12, "update": 4}
    assert ours["timed"]["first_log_ratio"] == 0.0
    assert all(line["replay_error"] == 0.0 for line in lines if line["variant"].startswith("ours"))
    assert ours["settings"] == {"optimizer.lr": 3e-4}
    assert ours["job_seconds"]["total"] == min(ours["totals"])
    text = render(lines)
    assert " of 2 |" in text
    assert "Same work: clips and steps [2, 3, 1]; forward passes of the rollout 12" in text
    assert "DIFFER" not in text
    other = {**ours, "variant": "peer", "lora": {"parameters": 1}}
    assert "LoRA parameters DIFFER" in render([*lines, other])


def test_a_part_is_scaled_to_the_whole_job(modules: None) -> None:
    from job import FULL, choose_level

    part = FULL.part(2)
    seconds = {"rollout": 1.0 * part.forwards, "update": 3.0 * part.replays, "decode": 2.0 * part.group}
    assert FULL.whole(part, seconds) == pytest.approx({"rollout": 80.0, "update": 48.0, "decode": 8.0, "total": 136.0})
    warm = {"rollout": 1.0 * FULL.warmup().forwards, "update": 3.0 * FULL.warmup().replays}
    assert [choose_level(FULL, warm, 10.0, share) for share in (140.0, 137.0, 75.0, 70.0)] == [0, 1, 1, 2]


def test_the_median_iteration_counts_and_all_are_told(modules: None) -> None:
    import meter
    from job import FULL

    rollouts = iter([1.0, 3.0, 9.0, 2.0])
    content: dict[str, Any] = {}
    options = {"repeats": 3, "level": 0}
    meter.measure_iterations(content, FULL, options, str, lambda part: {"seconds": {"rollout": next(rollouts)}})
    assert content["timed"]["seconds"] == {"rollout": 3.0}
    assert content["job_seconds"]["total"] == 3.0
    assert content["totals"] == [2.0, 3.0, 9.0]


def test_every_variant_has_its_framework(modules: None) -> None:
    import importlib.util

    from variants import VARIANTS

    assert all(importlib.util.find_spec(variant.framework) for variant in VARIANTS.values())
    ours = [variant.settings for variant in VARIANTS.values() if variant.framework == "ours"]
    from ours import override

    from sage_grpo.training.config import TrainConfig

    for settings in ours:
        for key, value in settings.items():
            override(TrainConfig(), key.split("."), value)


def test_the_floor_is_that_of_the_real_models(modules: None) -> None:
    """198 TFLOP of attention and 85 of products in a pass of Wan 1.3B at 480p x 81 (docs/speed.md)."""
    from types import SimpleNamespace

    from floor import floors, wan_work
    from weights import WAN

    work = wan_work(SimpleNamespace(**WAN), (16, 21, 60, 104))
    assert work.attention == pytest.approx(198e12, rel=0.01)
    assert work.products == pytest.approx(85e12, rel=0.01)
    seconds = floors(work, {"attention": 617e12, "attention_backward": 617e12, "products": 778e12})
    assert seconds["forward"] == pytest.approx(0.43, abs=0.01)
    assert seconds["guided_training_pass"] == pytest.approx(2 * (0.43 + 2.5 * 198 / 617 + 85 / 778), abs=0.02)


def test_what_does_not_fit_the_budget_is_left_out(
    modules: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import run

    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    started: list[tuple[str, str]] = []

    def start(unit: dict[str, Any], seconds: float) -> None:
        started.append((unit["model"], unit["variant"]))
        assert 0 < unit["seconds"] <= seconds
        now[0] += 75.0

    run.measure(run.parse(["--out", str(tmp_path / "out.jsonl"), "--budget", "200"]), tmp_path, start)
    assert started == [("wan", "ours"), ("hunyuan15", "ours")]
    assert "wan ours_14: left out; 50 s are left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "ours,theirs"], "there is no 'theirs'"),
        (["--variants", "peer"], "needs --peer PATH"),
        (["--variants", "peer_kept"], "needs --peer PATH"),
        (["--repeats", "0"], "at least 1, got 0"),
        (["--peer", "."], "it has no folder examples"),
        (["--set", "model.compile"], "--set takes KEY=VALUE"),
    ],
)
def test_wrong_options_are_named(
    modules: None,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import run

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run.parse(["--out", "out.jsonl", *arguments])
    assert message in capsys.readouterr().err


def test_documents_hold_the_tables_of_their_files(modules: None) -> None:
    from table import fill

    root = FOLDER.parents[1]
    text = (root / "docs" / "speed.md").read_text()
    assert text.count("<!-- table ") == text.count("<!-- end of table -->") > 0
    assert fill(text, root) == text, "run `python benchmarks/side_by_side/table.py --into docs/speed.md`"


def test_what_a_machine_lacks_is_stood_in_for(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    import stubs

    for name in [name for name in sys.modules if name.split(".")[0] in STAND_INS]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in STAND_INS else find(name))
    assert stubs.install() == list(STAND_INS)
    monkeypatch.undo()
    import ftfy

    from sage_grpo.models.checkpoints.checkpoint import require_ftfy

    assert ftfy.fix_text("a fox") == "a fox"
    require_ftfy()  # which looks for the package only
    rows = stubs.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    twice = rows.map(
        lambda batch: {"text": [2 * text for text in batch["prompt"]]},
        batch_size=2,
        fn_kwargs=None,
        cache_file_name=None,
    )
    assert [twice[row]["text"] for row in range(len(twice))] == ["aa", "bb", "cc"]
