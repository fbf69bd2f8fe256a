"""`sage-grpo generate`: the right clips in the right files, whatever the batch."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest
import torch

import double
import tiny
import trainer_toys
from sage_grpo.clips.files import ScoredVideo, best_and_worst
from sage_grpo.clips.generate import _policy
from sage_grpo.commands.generate import Options, run
from sage_grpo.data.examples import load_examples
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.models.spec import ModelSpec
from sage_grpo.rewards.spec import RewardSpec


@pytest.fixture
def wan(checkpoint):
    return checkpoint("wan_t2v")


def options(folder, out, **fields) -> Options:
    spec = fields.pop("model", ModelSpec(path=str(folder), cache=None, guidance_scale=1.0))
    return Options(model=spec, out=str(out), progress=False, steps=2, **fields)


@pytest.mark.parametrize("last", [True, False])
def test_the_last_step_explores_only_where_its_noise_may_stay(last: bool, wan, tmp_path) -> None:
    given = options(wan, tmp_path, prompts="a cat", kernel=KernelSpec(name="sage"), deterministic_last=last)
    model = given.model.load("cpu")
    assert _policy(given, model).schedule.stochastic == (True, not last)
    # Unless told, as a run does it: on this grid the step before the last would hold far too much noise, too.
    assert _policy(replace(given, deterministic_last=None), model).schedule.stochastic == (False, False)
    exact = replace(given, deterministic_last=None, kernel=KernelSpec(name="sage_exact"))
    assert _policy(exact, model).schedule.stochastic == (True, True)


def test_the_checkpoints_solver_makes_the_stock_pipelines_clip(wan, tmp_path, monkeypatch) -> None:
    from sage_grpo.flow.noise import keyed_noise
    from sage_grpo.models.family import FamilyModel

    folder = tiny.variant(wan, tmp_path / "unipc", scheduler=tiny.unipc())
    call = {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 1.0, "num_inference_steps": 5}
    decode, made = FamilyModel.decode, []
    monkeypatch.setattr(FamilyModel, "decode", lambda self, latents: made.append(latents) or decode(self, latents))
    with double.whole():
        noise = keyed_noise((16, 2, 4, 4), "generate", 0, "start")[None]
        stock = tiny.pipeline(folder)(prompt="a cat", latents=noise, output_type="latent", **call).frames
        for solver in ("checkpoint", "euler"):
            run(replace(options(folder, tmp_path / solver, prompts="a cat", solver=solver), steps=5))
    torch.testing.assert_close(made[0], stock, rtol=double.CLOSE, atol=double.CLOSE)
    assert (made[1] - stock).abs().max() > 1e-3


def test_the_best_and_the_worst_clip_of_a_prompt_become_a_pair(wan, tmp_path, capsys, written) -> None:
    """Which they are is what the sampled clips score, whose files a codec has changed."""
    (tmp_path / "p.csv").write_text("prompt,told\na cat,1\na dog,2\na third,3\n")
    bright = [RewardSpec(name="trainer_toys:bright", weights={"trainer_toys:bright": 1.0})]
    fields = {"prompts": str(tmp_path / "p.csv"), "first": 2, "per_prompt": 3, "rewards": bright}
    assert run(options(wan, tmp_path / "out", batch=4, **fields)) == 0
    assert "6 clips, their scores and 2 pairs" in capsys.readouterr().out
    shines = {file: trainer_toys.bright(clip[None], [""], 8.0).item() for file, clip in written.items()}
    with (tmp_path / "out" / "scores.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert {tmp_path / "out" / row["video"]: float(row["total"]) for row in rows} == shines
    assert {(row["fps"], row["frames"], row["height"], row["width"]) for row in rows} == {("8.0", "5", "32", "32")}
    examples = load_examples(tmp_path / "out", pairs=True)
    assert [(one.text, dict(one.metadata)) for one in examples] == [("a cat", {"told": "1"}), ("a dog", {"told": "2"})]
    for place, one in enumerate(examples):
        files = list(shines)[3 * place : 3 * place + 3]
        assert one.clips == (max(files, key=shines.__getitem__), min(files, key=shines.__getitem__))
    with pytest.raises(ValueError, match="set --per_prompt to 2 or more"):
        options(wan, tmp_path, prompts="a cat", rewards=bright)


def test_videos_that_nothing_tells_apart_make_no_pair() -> None:
    totals = [("a", 1.0), ("a", 1.0), ("b", math.nan), ("b", 2.0), ("c", 0.5), ("c", 0.0)]
    rows = [ScoredVideo(f"{n}.mp4", text, scores={"total": total}) for n, (text, total) in enumerate(totals)]
    assert best_and_worst(rows) == [{"prompt": "c", "win": "4.mp4", "lose": "5.mp4"}]
