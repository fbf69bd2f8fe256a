"""The scripts of the worlds' models: ceilings and renders are of the world itself, and words are refused with their remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from research.pretraining import commands
from research.pretraining.scenes import __main__ as scenes
from research.pretraining.shapes import __main__ as shapes
from sage_grpo.utils.video import read_image
from sage_grpo.worlds.world import SHAPES


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """place, result -> the words and names of every call of that place, which returns the result from now on."""

    def watched(place: str, result: Any = None) -> list[Any]:
        found: list[Any] = []
        monkeypatch.setattr(place, lambda *words, **named: found.append((words, named)) or result)
        return found

    return watched


@pytest.mark.parametrize("script", [shapes, scenes])
def test_a_script_explains_itself_and_refuses_other_actions(script: Any, capsys: pytest.CaptureFixture) -> None:
    def status(*argv: str) -> int:
        return commands.main(script.Options, script.run, prog="script", about=script.__doc__, argv=argv)

    assert status("--help") == 0
    assert "usage: script" in capsys.readouterr().out
    assert status("bake") == 2
    assert "action must be one of pretrain" in capsys.readouterr().err
    assert status("score") == 2
    assert "score needs --model FOLDER" in capsys.readouterr().err


def test_a_worlds_ceiling_and_renders_are_of_its_own_scenes(tmp_path: Path, calls, capsys) -> None:
    place = "research.pretraining.score"
    clips = {"clean": torch.full((4, 3, 8, 8, 3), 100, dtype=torch.uint8)}
    seen = calls(f"{place}.clean_clips", clips)
    judged = calls(f"{place}.judge_clips", {"TA": 0.5, "TA/size": 1.0})
    maker: Any = SimpleNamespace(world=SHAPES, load_vae=lambda folder, device: folder, codec=lambda vae: ("codec", vae))
    options = commands.WorldOptions(out=tmp_path, prompts=2, draws=2, seed=9, model=Path("vae"))
    assert commands.ceiling(maker, options) == 0
    texts = SHAPES.texts("heldout")[:2] * 2
    assert seen == [((SHAPES, ("codec", Path("vae")), texts), {"seed": 9})]
    assert judged[0][0] == (SHAPES, clips["clean"], texts)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("clean     TA 0.5000  flicker ")
    assert told[1] == f"wrote {tmp_path / 'ceiling.json'}"
    found = json.loads((tmp_path / "ceiling.json").read_text())
    assert {key: found[key] for key in ("prompts", "draws", "seed")} == {"prompts": 2, "draws": 2, "seed": 9}
    assert list(found["clean"]) == ["TA", "flicker", "sharpness"]
    assert commands.render(maker, options) == 0
    frames, side, _ = SHAPES.format
    sheet, zoom = read_image(tmp_path / "renders.png"), max(1, round(96 / side))
    assert sheet.shape == (2 * (side * zoom + 24) + 3, frames * side * zoom + (frames - 1) * 3, 3)
    assert len((tmp_path / "renders.txt").read_text().splitlines()) == 2
    with pytest.raises(FileNotFoundError, match="shapes score needs --model FOLDER"):
        commands.score(maker, replace(options, model=None))
    (tmp_path / "model_index.json").write_text("{}")
    asked = calls(f"{place}.score")
    words = SimpleNamespace(action="score", out=tmp_path / "x", model=tmp_path, prompts=2, steps=3)
    assert commands.run(SHAPES, words) == 0
    named = {"prompts": 2, "steps": 3, "pictures": tmp_path / "x", "device": torch.device("cpu")}
    assert asked == [((SHAPES, tmp_path), named)]
