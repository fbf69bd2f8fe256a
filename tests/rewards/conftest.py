"""What the tests of rewards share: specs on tiny checkpoints, which are written once a session where they are asked for."""

from __future__ import annotations

import pytest
from tiny_rewards import Make, maker


@pytest.fixture(scope="session")
def spec(tmp_path_factory) -> Make:
    return maker(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def clip_model(spec) -> str:
    return spec("clip").options["model"]


@pytest.fixture
def small(monkeypatch):
    """A sixteenth of HPSv3's real size, to be quick."""
    monkeypatch.setattr("sage_grpo.rewards.built_in.hpsv3.PIXELS", 16 * 28 * 28)
