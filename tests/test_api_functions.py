"""What the functions of the API hand to the parts that do the work, and what they give back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sage_grpo import api
from sage_grpo.generation import evaluate, generate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.types import Sound


def test_pairs_are_of_the_base_and_the_tuned_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(evaluate, "measure_pair", lambda *given: asked.append(given) or ("base", "tuned"))
    monkeypatch.setattr(evaluate, "compare", lambda base, tuned: {"between": (base, tuned)})
    pairs = api.evaluate_pairs(model=ModelSpec(shift=2.0), rewards="video_stats", prompts=["a", "b"], lora="adapter")
    assert (pairs.base, pairs.tuned, pairs.differences) == ("base", "tuned", {"between": ("base", "tuned")})
    ((spec, objects),) = asked
    assert (spec.model.shift, spec.lora, [one.name for one in spec.rewards]) == (2.0, "adapter", ["video_stats"])
    assert [prompt.text for prompt in objects.prompts] == ["a", "b"]


@pytest.mark.parametrize("trust", [None, True])
def test_a_run_is_trusted_only_if_that_was_asked(trust: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def of_run(folder: str, **options: object) -> evaluate.EvaluateSpec:
        asked.append((folder, options))
        return evaluate.EvaluateSpec(run=folder)

    monkeypatch.setattr(evaluate.EvaluateSpec, "of_run", of_run)
    monkeypatch.setattr(evaluate, "measure", lambda spec, objects: spec.run)
    options = {} if trust is None else {"trust_run": trust}
    assert api.evaluate("somewhere", **options) == "somewhere"
    assert asked == [("somewhere", {"trust": bool(trust), "rewards": True})]


def test_clips_of_all_batches_come_with_their_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(None, torch.full((n, 2, 4, 4, 3), n), Sound(torch.full((n, 1, 5), float(n)), 16000)) for n in (2, 1)]
    monkeypatch.setattr(generate, "sample", lambda spec, loaded, clips: batches)
    loaded = SimpleNamespace(video=SimpleNamespace(fps=8.0))
    monkeypatch.setattr(generate.GenerateSpec, "find", lambda spec, model: SimpleNamespace(load=lambda given: loaded))
    made = api.generate(["a", "b", "c"], seed=3)
    assert made.videos[:, 0, 0, 0, 0].tolist() == [2, 2, 1]
    assert (made.sound.waves[:, 0, 0].tolist(), made.sound.rate) == ([2.0, 2.0, 1.0], 16000)
    assert (made.prompts, made.seeds, made.fps) == (["a", "b", "c"], [3, 4, 5], 8.0)
    batches[:] = [(None, torch.zeros(3, 2, 4, 4, 3), None)]
    assert api.generate(["a", "b", "c"]).sound is None
