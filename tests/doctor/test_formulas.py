"""Every check on made-up figures: each input is told apart from the others, and each verdict turns at its limit, to either side."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn

from sage_grpo.distributed.world import World
from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.tools.doctor import checkpoint, examine, learning, machine, reward
from sage_grpo.tools.doctor.check import Check

FLOAT = torch.float64
TWO, FOUR = torch.tensor([0, 0, 1, 1]), torch.arange(4).repeat_interleave(2)
UNIT = torch.tensor([0.0, math.sqrt(2)] * 4, dtype=FLOAT)
"""Scores of four prompts with two clips each: their spread within groups is 1."""


def scored(groups: Tensor = FOUR, first: Tensor = UNIT, **other: Tensor) -> reward.Scoring:
    same = dict.fromkeys(("first", "again", "reversed", "single", "path"), first)
    return reward.Scoring(**{"groups": groups, **same, "swapped": first[None] - 1.0, **other})  # type: ignore[arg-type]


# ---- rewards


def shifted(*by: float) -> Tensor:
    return (UNIT + torch.tensor(by, dtype=FLOAT).repeat_interleave(2))[None]


@pytest.mark.parametrize(
    ("swapped", "status", "value"),
    [
        (shifted(-1, -1, -1, -1), "pass", "with another prompt scores change by up to 1 of the spread; own prompts score +1 higher"),
        (shifted(1, 1, 1, 1), "fail", "clips score 1 +- 0 higher with the prompts of other clips"),
        # The means of groups have a standard deviation of 1.155, so their mean has a standard error of 0.577.
        (shifted(0.1, 2.1, 0.1, 2.1), "pass", "with another prompt scores change by up to 2.1 of the spread; own prompts score -1.1 higher"),
        (shifted(0.2, 2.2, 0.2, 2.2), "warn", "clips score 1.2 +- 0.58 higher with the prompts of other clips"),
        (shifted(1.3, 3.3, 1.3, 3.3), "warn", "clips score 2.3 +- 0.58 higher with the prompts of other clips"),
        (shifted(1.4, 3.4, 1.4, 3.4), "fail", "clips score 2.4 +- 0.58 higher with the prompts of other clips"),
        (torch.cat([shifted(-1, -1, -1, -1), shifted(1, 1, 1, 1)]), "fail", "clips score 1 +- 0 higher with the prompts of other clips"),
        (shifted(9e-4, 0, 0, 0), "warn", "scores are the same with another clip's prompt"),
        (shifted(-2e-3, 0, 0, 0), "pass", "with another prompt scores change by up to 0.002 of the spread; own prompts score +0.0005 higher"),
        (UNIT[None][:0], "skip", "one prompt only"),
    ],
)  # fmt: skip
def test_prompts_of_other_clips(swapped: Tensor, status: str, value: str) -> None:
    found = reward.prompts(scored(swapped=swapped))
    assert (found.name, found.status, found.value) == ("reward prompt", status, value)


@pytest.mark.parametrize(
    ("check", "column", "off", "status"),
    [
        (reward.prompts, "path", 0.49, "pass"), (reward.prompts, "path", 0.51, "fail"), (reward.prompts, "path", math.nan, "fail"),
        (reward.spread, "again", 0.009, "pass"), (reward.spread, "again", -0.011, "warn"), (reward.spread, "again", 9.9, "fail"),
        (reward.batch, "reversed", 0.049, "pass"), (reward.batch, "reversed", 0.051, "warn"), (reward.batch, "reversed", -0.51, "fail"),
        (reward.batch, "single", 0.049, "pass"), (reward.batch, "single", -0.051, "warn"), (reward.batch, "single", 0.51, "fail"),
    ],
)  # fmt: skip
def test_a_scoring_that_differs_is_told_in_units_of_the_spread(check, column: str, off: float, status: str) -> None:
    found = check(scored(**{column: UNIT + off * torch.eye(8, dtype=FLOAT)[3]}))
    assert found.status == status
    if status != "pass" and math.isfinite(off):
        assert check is reward.spread or found.number == pytest.approx(abs(off))
        assert f"{abs(off):.2g}" in found.value


@pytest.mark.parametrize(
    ("first", "again", "options", "status", "value", "remedy"),
    [
        (UNIT, UNIT, {"eta": 0.5}, "pass", "std within groups 1, of which noise 0; two calls differ by up to 0 of it", "take a reward that tells clips of one prompt apart, or raise batch.group_size; or explore more than with kernel.eta 0.5 (`sage-grpo probe` compares etas)"),
        (UNIT, UNIT, {}, "pass", "std within groups 1, of which noise 0; two calls differ by up to 0 of it", "take a reward that tells clips of one prompt apart, or raise batch.group_size"),
        (0 * UNIT, 0 * UNIT, {"eta": 3.0, "overshoots": True}, "fail", "std within groups 0, of which noise 0; two calls differ by up to 0 of it", "lower kernel.eta (3) until `stability` passes: these clips hold more noise than video, which no reward can rank"),
        (UNIT, UNIT + 0.5, {"eta": 0.5}, "warn", "std within groups 1, of which noise 0.35; two calls differ by up to 0.5 of it", "put the reward in eval mode, fix its seed, and let it sample frames by time; or score every clip several times and average"),
        (UNIT, UNIT + 1.5, {}, "fail", "std within groups 1, of which noise 1.1; two calls differ by up to 1.5 of it", "put the reward in eval mode, fix its seed, and let it sample frames by time; or score every clip several times and average"),
    ],
)  # fmt: skip
def test_a_spread_is_compared_with_its_noise(first, again, options, status, value, remedy) -> None:
    found = reward.spread(scored(first=first, again=again), **options)
    assert (found.status, found.value, found.remedy) == (status, value, remedy)
    noisy, off = scored(again=UNIT - 0.5), torch.full((8,), 1.0)
    assert [reward._is_noise(size * off, noisy) for size in (0.0, 0.99, -1.0, 1.01)] == [False, True, True, False]
    assert reward._advantage(torch.ones(2), torch.zeros(2)) == (1.0, math.inf)


def test_what_chance_alone_makes_is_blamed_on_nothing_else() -> None:
    """Two equal calls differ by a half, so twice as much is chance, and more is not."""
    again, near, far = UNIT + 0.5, UNIT - 1.0, UNIT + 1.2
    for noise, chance in ((again, "skip"), (UNIT, "fail")):
        assert reward.batch(scored(again=noise, reversed=near, single=near)).status == chance
        assert reward.batch(scored(again=noise, reversed=near, single=far)).status == "fail"
        assert reward.prompts(scored(again=noise, path=near)).status == chance
        assert reward.prompts(scored(again=noise, path=far)).status == "fail"
        read = torch.stack([near, UNIT - 1.2])
        assert reward.prompts(scored(again=noise, swapped=read)).status == "pass"
        assert reward.prompts(scored(again=noise, swapped=read[:1])).status == ("skip" if chance == "skip" else "pass")


@pytest.mark.parametrize(("noise", "status", "share"), [(0.0, "warn", 1.0), (3.0, "pass", 0.0)])
def test_a_reward_that_is_brightness_is_told(noise: float, status: str, share: float) -> None:
    levels = torch.tensor([10, 90, 40, 200, 60, 120, 30, 70], dtype=torch.uint8)
    videos = levels.view(8, 1, 1, 1, 1).expand(8, 3, 4, 4, 3).contiguous()
    first = levels.double() / 100 + noise * keyed_noise((8,), "noise").double()
    found = reward.statistics(scored(TWO.repeat_interleave(2), first), videos, 8.0)
    assert found.value.startswith("brightness explain ")
    assert (found.status, found.number > 0.9) == (status, share == 1.0)
    some = (TWO.repeat_interleave(2)[:7], first[:7])
    assert reward.statistics(scored(*some), videos[:7], 8.0).status == status, "four degrees of freedom are left"
    few = reward.statistics(scored(some[0][:6], first[:6]), videos[:6], 8.0)
    assert (few.status, few.value) == ("skip", "6 clips of 2 prompts are too few for a fit")


def test_the_fit_of_statistics_pays_for_its_columns(monkeypatch) -> None:
    """The share of the variance that is explained, corrected for prompts and columns; against the normal equations."""
    columns, groups = keyed_noise((16, 4), "columns").double(), torch.arange(4).repeat_interleave(4)
    scores = scored(groups, keyed_noise((16,), "scores").double())

    def centred(values: Tensor) -> Tensor:
        return (values.view(4, 4, -1) - values.view(4, 4, -1).mean(1, keepdim=True)).flatten(0, 1)

    def statistics(parts: tuple[str, ...]) -> Any:
        return lambda videos, prompts, fps: dict(zip(parts, columns.T, strict=True))

    monkeypatch.setattr(reward, "VideoStats", statistics)
    found = reward.statistics(scores, torch.zeros(16, 1, 1, 1, 3), 8.0)
    x, y = centred(columns), centred(scores.first[:, None])
    rest = y - x @ torch.linalg.solve(x.T @ x, x.T @ y)
    wanted = 1 - float(rest.square().sum() / (16 - 4 - 4)) / float(y.square().sum() / (16 - 4))
    assert found.number == pytest.approx(wanted, abs=1e-9)
    assert reward.within(scores.first, groups) == pytest.approx(math.sqrt(float(y.square().sum()) / 12), abs=1e-12)


# ---- the machine


def test_libraries_are_compared_number_by_number(monkeypatch) -> None:
    there = {"torch": "2.10.1", "diffusers": "0.36.0", "transformers": "4.9.9", "peft": "1.0"}
    wanted = ["torch>=2.9", "diffusers>=0.36.0", "transformers>=4.57.1", "peft>=9; extra == 'x'", "numpy"]
    monkeypatch.setattr(machine, "version", lambda name: there[name])
    monkeypatch.setattr(machine, "requires", lambda name: wanted)
    found = machine.versions()
    assert (found.status, found.remedy) == ("fail", "pip install -U 'transformers>=4.57.1'")
    assert found.value == "torch 2.10.1, diffusers 0.36.0, transformers 4.9.9 (needs 4.57.1), peft 1.0"
    there["transformers"] = "4.57.1"
    assert machine.versions().status == "pass"


@pytest.mark.parametrize(
    ("free", "dtype", "able", "status"),
    [(40, "bfloat16", True, "pass"), (39, "bfloat16", True, "warn"), (60, "bfloat16", False, "fail"), (60, "float32", False, "pass")],
)  # fmt: skip
def test_half_of_a_gpu_is_to_be_free(free: int, dtype: str, able: bool, status: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: able)
    found = machine.device(ModelSpec(device="cpu", dtype=dtype), torch.device("cuda"))
    assert (found.status, found.number) == (status, free / 80)
    assert found.value.startswith(f"card, {free} of 80 GiB free, {dtype}")


def test_what_a_kernel_does_on_a_grid() -> None:
    schedule = Schedule(torch.tensor([1.0, 0.5, 0.25, 0.0]), (True, True, False))

    def kernel(*stds: float) -> Any:
        left = iter(stds)
        return lambda sigma, after: SimpleNamespace(std=torch.tensor(next(left)))

    bad = machine.stability(kernel(0.5, math.nan, -1.0), schedule)
    assert (bad.status, bad.value) == ("fail", "the noise is not a number at step(s) [1, 2]")
    assert machine.stability(kernel(0.5, 0.5, math.inf), schedule).status == "fail"
    still = machine.stability(kernel(0.0, 0.0, 0.0), replace(schedule, stochastic=(False,) * 3))
    assert (still.status, still.value) == ("fail", "no step explores")
    stable = machine.stability(KernelSpec(name="sage_exact", eta=0.7).build(), schedule, "more")
    assert stable.status == "pass"
    assert stable.value.startswith(f"final variance {stable.number:.3f} (1 is right), off the data ")
    assert stable.value.endswith("; more")
    assert stable.number == pytest.approx(0.35624, abs=1e-5)


# ---- the checkpoint


def condition(value: float, length: int = 4) -> Any:
    return SimpleNamespace(tensors={"text": torch.full((length,), value)})


def model_of(**more: Any) -> Any:
    def velocity(x: Tensor, sigma: Tensor, given: list[Any], guidance: float | None = None) -> Tensor:
        assert float(sigma) == pytest.approx(0.7)
        return torch.stack([torch.full_like(row, float(one.tensors["text"][0])) for row, one in zip(x, given)])

    spec = SimpleNamespace(dtype="float32", lora=None)
    own = {"velocity": velocity, "spec": spec, "dtype": torch.float32, "device": "cpu", "latent_shape": lambda: (2, 3)}
    return SimpleNamespace(**own | {"encode": lambda texts, images: [condition(1.0), condition(2.0, 9)]} | more)


LIMITS = {"pipeline": (2e-4, 8e-4), "padding": (2e-4, 2e-3), "save": (5e-5, 2e-4)}


@pytest.mark.parametrize("name", ["pipeline", "padding"])
def test_what_differs_is_graded_by_the_precision(name: str, monkeypatch) -> None:
    def told(gap: float) -> Check:
        found = condition(1.0 + gap).tensors
        model = model_of(cache=SimpleNamespace(folder="cache"))
        if name == "pipeline":
            stock_latents = lambda model, text, image, x, steps: torch.ones(4) * steps * (text == "a cat")  # noqa: E731
            monkeypatch.setattr(checkpoint, "stock_latents", stock_latents)
            monkeypatch.setattr(checkpoint, "our_latents", lambda model, condition, x, steps: found["text"] * steps)
            model.encode = lambda texts, images: [condition(1.0)]
            check, wanted = checkpoint.pipeline(model, "a cat", None)
            assert wanted.tolist() == [2.0] * 4
            return check
        plain = model.velocity
        model.velocity = lambda x, sigma, given: plain(x, sigma, given) * (1 + gap * (len(x) == 2))
        return checkpoint.padding(model, torch.zeros(1, 2, 3), [None])

    warn, fail = LIMITS[name]
    found = [(told(gap).status, told(gap).name) for gap in (0.0, 0.9 * warn, 1.1 * warn, 0.9 * fail, 1.1 * fail)]
    assert found == [(status, name) for status in ("pass", "pass", "warn", "warn", "fail")]
    assert told(1.0).number == pytest.approx(1.0)
    assert "differ" in told(1.0).value
    assert told(1.0).value.endswith("by 1")


def test_the_stock_pipeline_has_the_scale_of_the_model_and_gets_its_own_back() -> None:
    guider = SimpleNamespace(guidance_scale=7.0)
    pipe = Mock(guider=guider, side_effect=lambda **asked: [asked["latents"] * guider.guidance_scale])
    size, traits = SimpleNamespace(frames=5, height=32, width=48), SimpleNamespace(encoders=("text_encoder",))
    model = model_of(pipe=pipe, traits=traits, video=size, index={}, spec=ModelSpec(), guidance_scale=5.0)
    model.device = torch.device("cpu")
    for guider.use_original_formulation, scale in ((True, 4.0), (False, 5.0)):
        assert checkpoint.stock_latents(model, "a cat", None, torch.ones(1), 3).tolist() == [scale]
        assert guider.guidance_scale == 7.0


# ---- sampling


@pytest.mark.parametrize(
    ("asked", "own", "off", "status", "said"),
    [
        (3.0, 3.0, 0.0, "pass", "scale 3; an update and a pass at that scale differ by 0"),
        (3.0, 3.0, 9e-5, "pass", "update"), (3.0, 3.0, 2e-4, "warn", "update"), (3.0, 3.0, 0.02, "fail", "update"),
        (None, 3.0, 0.0, "pass", "scale 3; an update and a pass at that scale differ by 0"),
        (1.0, 3.0, 0.0, "warn", "scale 1; an update and a pass at that scale differ by 0; but evaluation and generate sample at scale 3"),
    ],
)  # fmt: skip
def test_a_replay_is_compared_with_a_pass_at_the_scale_that_was_asked_for(
    asked, own, off, status, said, monkeypatch
) -> None:
    seen = []

    def velocity(x: Tensor, sigma: float, conditions: object, guidance: float | None) -> Tensor:
        seen.append((sigma, conditions, guidance))
        return torch.ones(2)

    model = SimpleNamespace(guidance_scale=own, device="cpu", velocity=velocity)
    trainer = SimpleNamespace(model=model, config=SimpleNamespace(model=SimpleNamespace(training_guidance=asked)))
    policy = SimpleNamespace(schedule=SimpleNamespace(pair=lambda step: (0.1 * step, 0.0)))
    items = [
        SimpleNamespace(step=step, record=SimpleNamespace(x=torch.zeros(2), conditions=f"c{step}", policy=policy, log_prob_old=None))
        for step in (4, 5, 6)
    ]  # fmt: skip
    replayed = {4: torch.ones(2), 6: torch.ones(2) * (1 + off)}
    monkeypatch.setattr(learning.loss, "replay", lambda item, device: SimpleNamespace(velocity=replayed[item.step]))
    found = learning.guidance(SimpleNamespace(trainer=trainer), items)  # type: ignore[arg-type]
    assert seen == [(pytest.approx(0.4), "c4", asked), (pytest.approx(0.6), "c6", asked)], "the first and the last"
    assert (found.status, found.number) == (status, pytest.approx(off, rel=1e-2))
    assert found.value == said or (off and said in found.value)


# ---- learning and the whole


@pytest.mark.parametrize(
    ("by", "held", "status"),
    [(0.0, None, "pass"), (0.39, None, "pass"), (0.41, None, "warn"), (-0.41, 1.0, "warn"), (1.1, None, "fail"), (1.1, 1.0, "warn"), (math.inf, 1.0, "fail"), (math.nan, None, "fail")],
)  # fmt: skip
def test_how_far_one_update_may_go(by: float, held: float | None, status: str, monkeypatch) -> None:
    monkeypatch.setattr(learning, "velocities", lambda trainer, items: [torch.ones(2), torch.full((2,), 1 + by)])
    trainer = SimpleNamespace(config=SimpleNamespace(optimizer=SimpleNamespace(lr=0.5, max_kl=held)))
    found = learning.step_size(trainer, [], [torch.ones(2)] * 2)  # type: ignore[arg-type]
    size = abs(by) if math.isfinite(by) else math.inf
    taken = ", which optimizer.max_kl takes back in part" if held and status != "pass" else ""
    assert (found.status, found.number) == (status, pytest.approx(size))
    assert found.value == f"one update at learning rate 0.5 moved the velocities by {size:.2g} of their size{taken}"


def test_weights_are_watched_whose_gradient_is_not_lost_beside_the_others() -> None:
    p = nn.Parameter(torch.zeros(5000))
    assert not learning._pushed(p).any()
    p.grad = torch.ones(5000)
    p.grad[:2] = torch.tensor([0.009, -0.011])
    found = learning._pushed(p)
    assert (len(found), found[:3].tolist()) == (4096, [False, True, True])
    names = {"a.q.lora_A.w": 0, "a.q.lora_B.w": 0, "a.k.weight": 0, "a.k.bias": 0, "norm.weight": 0}
    assert learning._modules(names) == {"a.q", "a.k", "norm"}


def test_ranks_that_found_something_worse_are_told_by_number(monkeypatch) -> None:
    lists: list[dict[str, Any]] = [{"x": "pass", "y": "warn"}, {"x": "skip", "y": "warn", "z": "warn"}]
    lists.append({"x": "warn", "z": "pass"})
    found = [[Check(name, status, "3") for name, status in rows.items()] for rows in lists]
    texts = [json.dumps([asdict(one) for one in rows]) for rows in found]
    monkeypatch.setattr(World, "texts", lambda self, text: [text, *texts[1:]])
    assert learning.ranks({}, World()).status == "skip"
    told = examine.over_ranks(found[0], World())
    worse = [("z", "warn", "rank 1: 3"), ("x", "warn", "rank 2: 3")]
    assert [(one.name, one.status, one.value) for one in told] == worse


def test_the_plan_that_is_checked_is_the_first_iterations() -> None:
    config = recipe("shapes/mix_grpo")
    window = replace(config.rollout.window, every=1)
    found = machine.plan(replace(config, rollout=replace(config.rollout, window=window)))
    assert "[0] trained" in found.value


def test_a_stock_decode_scales_latents_as_the_vae_says() -> None:
    """Without means by its factor alone; the clip is the first of what the VAE returns."""
    vae: Any = SimpleNamespace(parameters=lambda: iter([torch.zeros(1)]), dtype=torch.float32)
    vae.decode = lambda z, return_dict: (z, None)
    processor = SimpleNamespace(postprocess_video=lambda pixels, output_type: pixels.permute(0, 2, 1, 3, 4))
    model: Any = SimpleNamespace(pipe=SimpleNamespace(vae=vae, video_processor=processor))
    for config in ({"scaling_factor": 0.5}, {"latents_mean": [0.1] * 3, "latents_std": [1.0] * 3}):
        vae.config = FrozenDict(config)
        clips = checkpoint.stock_decode(model, torch.full((1, 3, 2, 4, 5), 0.1))
        assert (clips.shape, set(clips.flatten().tolist())) == ((1, 2, 4, 5, 3), {51})
