"""The scripts of the worlds' models explain themselves and refuse other words with their remedy."""

from __future__ import annotations

from typing import Any

import pytest

from research.pretraining import commands
from research.pretraining.scenes import __main__ as scenes
from research.pretraining.shapes import __main__ as shapes


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
