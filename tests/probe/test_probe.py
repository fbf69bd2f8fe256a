"""`sage-grpo probe`: the decomposition against known truths, and a recommendation that `train` takes."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import trainer_toys
from sage_grpo.cli.main import main
from sage_grpo.recipes import recipe
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.saved import Choice
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.windows import Window
from sage_grpo.tools.probe import estimate
from sage_grpo.tools.probe import probe as module
from sage_grpo.tools.probe.estimate import (
    CORRELATION,
    Effect,
    Estimate,
    advise,
    best_step,
    effect,
    spread,
)
from sage_grpo.tools.probe.probe import Prober, ProbeSpec, passes
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.inputs import load_rewards, prompts_from
from trainer_zoo.toy import SIZE, ToyModel

PROMPTS = 24


def quadruples(*shape: int) -> torch.Tensor:
    """Scalar noises in the probe's order, of this shape and four more in the last dimension."""
    first, other = torch.randn(2, *shape, dtype=torch.float64)
    second = CORRELATION * first + math.sqrt(1 - CORRELATION**2) * other
    return torch.stack([first, -first, second, -second], -1)


def test_components_are_unbiased() -> None:
    """Hermite polynomials of known variance, a start effect of known variance, and a level per prompt that must not count."""
    torch.manual_seed(1)
    prompts, starts, quads = 6000, 3, 4  # not as many, so that they cannot be taken for one another
    e = quadruples(prompts, starts, quads).flatten(2)
    r = 2.0 * e + 1.0 * (e**2 - 1) / math.sqrt(2) + 0.8 * (e**3 - 3 * e) / math.sqrt(6)
    r = r + 1.5 * torch.randn(prompts, starts, 1) + 100 * torch.randn(prompts, 1, 1)
    truth = {"start": 1.5**2, "explored": 4 + 1 + 0.64, "linear": 4 + CORRELATION**2 * 0.64}
    for name, values in estimate.split_variance(r).items():
        error = float(values.std()) / math.sqrt(prompts)
        assert abs(float(values.mean()) - truth[name]) < 3 * error, name
        assert error < 0.06 * truth[name]  # else the line above says little
    estimate.split_variance(torch.rand(3, 2, 8))
    for starts, members in ((1, 8), (2, 4), (2, 10), (2, 6)):
        with pytest.raises(ValueError, match=f"got {starts} starts and {members} members"):
            estimate.split_variance(torch.rand(3, starts, members))


def fixed(value: float, low: float | None = None, high: float | None = None) -> Estimate:
    return Estimate(value=value, low=value if low is None else low, high=value if high is None else high)


HALF, ZERO = fixed(0.5), fixed(0.0)


def seen(linear: Estimate = HALF, reward: Estimate = ZERO, drift: Estimate | None = None) -> Effect:
    return Effect(start=HALF, explored=HALF, linear=linear, std=fixed(1.0), reward=reward, drift=drift)


def test_a_step_that_hardly_explores_is_not_advised() -> None:
    still = replace(seen(fixed(0.9)), explored=fixed(estimate.LEAST / 2))
    assert advise([(2, still), (3, seen())], [(1.0, seen())]).steps == [3]


def test_a_failed_clip_costs_its_prompt_and_no_other() -> None:
    torch.manual_seed(3)
    rewards, still = torch.randn(5, 2, 8), torch.randn(5, 2)
    whole = effect(rewards[1:], still[1:])
    rewards[0, 1, 3] = math.nan
    assert effect(rewards, still) == whole
    rewards[1:4, 0, 0] = math.nan
    with pytest.raises(ValueError, match="Only 1 of 5 prompts"):
        effect(rewards, still)
    change, still_drifts = torch.linspace(0.1, 0.5, 5)[:, None], torch.rand(5, 2)
    drifts = (still_drifts + change)[..., None].expand(5, 2, 8)
    drift = effect(torch.randn(5, 2, 8), torch.randn(5, 2), drifts, still_drifts).drift
    assert drift is not None
    assert drift.value == pytest.approx(0.3)
    assert effect(torch.randn(5, 2, 8), torch.randn(5, 2), drifts).drift is None
    assert torch.equal(estimate._shares(torch.tensor([[0.0, -1.0, 1.0]])), torch.tensor([[0.0, 0.0, 1e30]]))
    assert torch.equal(estimate._shares(torch.tensor([[1.0, 3.0, 1.5]])), torch.tensor([[0.25, 0.75, 0.5]]))
    with pytest.raises(ValueError, match="the same for all clips"):
        effect(torch.ones(5, 2, 8), torch.ones(5, 2))


class Linear(ToyModel):
    """A velocity that is linear in x, and a decoder whose pixels are a slope times the latents around the middle."""

    rate = 0.6

    def velocity(self, x, sigma, conditions, *, guidance=None):
        return self.rate * x

    def decode(self, latents, progress=None):
        pixels = (128 + 20 * latents).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1)
        return pixels.repeat_interleave(2, 2).repeat_interleave(2, 3).contiguous()


@pytest.fixture
def probe_of(make_config):
    def make(model=None, spec: ProbeSpec | None = None, **fields) -> Prober:
        config = make_config(
            kernel=KernelSpec(name="sage_exact", eta=math.sqrt(2)),
            batch=BatchConfig(prompts=2, group_size=4, micro_batch=6),
            **fields,
        )
        prompts = prompts_from(config.data.prompts) * 5
        reward = load_rewards(config, torch.device("cpu"))
        spec, model = spec or ProbeSpec(prompts=PROMPTS), model or ToyModel(config.model)
        conditions = model.encode([prompt.text for prompt in prompts])
        return Prober(config, spec, model, reward, prompts[: spec.prompts], conditions)

    return make


def by_hand(prober: Prober, step: int, eta: float) -> tuple[float, float]:
    """Variances of the mean latent that come from the start and from the noise of a step, for the linear model."""
    grid, rate = prober.grid, Linear.rate
    transition = replace(prober.config.kernel, eta=eta).build()(*grid.pair(step))
    gains = [1 + float(b - a) * rate for a, b in zip(grid.sigmas[:-1], grid.sigmas[1:])]
    later = math.prod(gains[step + 1 :]) ** 2
    start = math.prod(gains[:step]) ** 2 * float(transition.a + transition.b * rate) ** 2
    return start * later, float(transition.std) ** 2 * later


@pytest.mark.parametrize(("step", "eta"), [(2, 0.5), pytest.param(0, 1.4, marks=pytest.mark.slow)])
def test_the_decomposition_of_a_linear_world(step, eta, probe_of) -> None:
    prober = probe_of(Linear(probe_of().config.model))
    still = prober.run(prober.still(), eta)
    clips = prober.run(prober.exploring(eta, step), eta)
    found = effect(clips.reward, still.reward[..., 0])
    start, noise = by_hand(prober, step, eta)
    both = start + noise
    for one, share in ((found.start, start / both), (found.explored, noise / both), (found.linear, 1.0)):
        slack = (one.high - one.low) / 2 + 1e-6  # one in twenty would miss the interval alone by chance
        assert one.low - slack < share < one.high + slack
        assert one.high - one.low < 1.2
    # bright is the mean pixel over 255
    std = 20 / 255 * math.sqrt(noise / SIZE)
    assert found.std.value == pytest.approx(std, rel=0.25)
    assert found.reward.low - 0.01 < 0 < found.reward.high + 0.01
    assert found.drift is None


@pytest.mark.parametrize(
    "rollout", [{"steps": 5}, {"steps": 8, "after_steps": 2, "solver": "ab2", "window": Window(kind="fixed", start=1)}]
)
def test_plans_make_the_passes_that_they_state(rollout, probe_of) -> None:
    prober, calls = probe_of(spec=ProbeSpec(prompts=2, starts=3), rollout=rollout), []
    velocity = prober.model.velocity

    def spied(x, sigma, conditions, **options):
        assert not torch.is_grad_enabled()
        calls.append(len(x))
        return velocity(x, sigma, conditions, **options)

    prober.model.velocity = spied
    for plans in (prober.still(), prober.exploring(1.0, None), *(prober.exploring(1.0, s) for s in prober.steps())):
        calls.clear()
        clips = prober.run(plans, 1.0)
        assert len(calls) == passes(plans)
        assert not any(plan.replays(0, 0) for plan in plans)  # nothing is kept for an update
        assert clips.reward.shape[:2] == (2, 3)
    if rollout["steps"] == 5:  # by hand: 3 starts in one batch, their trunks too; 3 x 8 members in batches of 6
        plans = (prober.still(), prober.exploring(1.0, 1), prober.exploring(1.0, None))
        assert list(map(passes, plans)) == [2 * 5, 2 * (2 + 4 * 3), 2 * (1 + 4 * 4)]


def light(videos: torch.Tensor, prompts, fps: float) -> dict[str, torch.Tensor]:
    mean = videos.float().mean((1, 2, 3, 4)) / 255
    return {"light": mean, "drift": 2 * mean.square()}


def test_a_probe_compares_every_setting_with_the_same_deterministic_clips(probe_of, monkeypatch) -> None:
    monkeypatch.setattr(trainer_toys, "light", light, raising=False)
    said: list[object] = []
    spec = ProbeSpec(prompts=3, starts=2, members=8, steps=[1, 2], etas=[0.5, 1.0])
    rewards = [RewardSpec(name="trainer_toys:light", weights={"light": 1.0, "drift": 0.0}, batch_size=0)]
    prober = probe_of(Linear(probe_of().config.model), spec, rewards=rewards)

    @contextmanager
    def counting(name: str, total: int):
        done: list[int] = []
        yield lambda: done.append(1)
        said.append((name, total, len(done)))

    found = module.probe(prober, said.append, counting)
    still = prober.run(prober.still(), 1.0)
    assert torch.equal(still.reward, found.still.reward)
    torch.testing.assert_close(still.drift, 2 * still.reward.square())

    def expected(step: int | None, eta: float) -> Effect:
        clips = prober.run(prober.exploring(eta, step), eta)
        return effect(clips.reward, still.reward[..., 0], clips.drift, still.drift[..., 0])

    own = math.sqrt(2)
    assert found.steps == [(step, expected(step, own)) for step in (1, 2)]
    assert found.every == expected(None, own)
    assert found.best == best_step(found.steps)
    assert [eta for eta, _ in found.etas] == [0.5, 1.0, own]
    assert found.etas[0][1] == expected(found.best, 0.5)
    assert found.etas[2][1] == dict(found.steps)[found.best]
    limit = [0.1 * spread(part[..., 0]) for part in (still.reward, still.drift)]
    assert found.advice == advise(found.steps, found.etas, loss=limit[0], drift=limit[1])
    counts = {step: passes(prober.exploring(own, step)) for step in (1, 2, None)}
    first, later = passes(prober.still()) + sum(counts.values()), [2 * counts[step] for step in (1, 2)]
    forecast, steps, etas = said
    assert f"each of 2 steps and for all at once, in micro-batches of 6: {first} passes" in forecast
    assert f"then {min(later)} to {max(later)} to compare" in forecast
    second = 2 * counts[found.best]
    assert (steps, etas) == (("steps", first, first), (f"eta at step {found.best}", second, second))
    assert found.passes == first + second
    told = module.document(prober, found)
    law = prober.config.kernel.build(prober.grid)(*prober.grid.pair(2))
    row = told["steps"][1]
    assert (row["step"], row["sigma"]) == (2, float(prober.grid.sigmas[2]))
    assert (row["sigma_next"], row["sensitivity"]) == (float(prober.grid.sigmas[3]), float(law.sensitivity))
    assert row["linear"] == asdict(found.steps[1][1].linear)
    assert told["sampled"] == {"prompts": 3, "starts": 2, "members": 8, "passes": found.passes}
    means = {
        "reward": still.reward.mean(),
        "drift": still.drift.mean(),
        "start_std": still.reward[..., 0].var(1).mean().sqrt(),
    }
    assert told["deterministic"] == pytest.approx({name: float(value) for name, value in means.items()})
    assert told["recommended"] == asdict(found.advice)


def test_the_text_encoder_is_let_go_before_anything_is_sampled(make_config, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ToyModel, "unload_text", lambda self: calls.append("unloaded"), raising=False)
    config = make_config(kernel=KernelSpec(name="sage_exact"))
    with pytest.raises(ValueError, match="names step 7"):
        module.prepare(config, ProbeSpec(prompts=2, steps=[7]), Choice())
    assert calls == []
    prober = module.prepare(config, ProbeSpec(prompts=2), Choice())
    assert (calls, len(prober.conditions), len(prober.prompts)) == (["unloaded"], 2, 2)


def test_a_reward_that_fails_is_refused_before_the_model_is_loaded(make_config, monkeypatch) -> None:
    config = make_config(kernel=KernelSpec(name="sage_exact"), rewards=[RewardSpec(name="trainer_toys:broken")])
    monkeypatch.setattr(Choice, "find", lambda *_: SimpleNamespace(load=lambda: pytest.fail("the model is loaded")))
    with pytest.raises(RewardConfigError, match="the reward's machine is gone"):
        module.prepare(config, ProbeSpec(prompts=2), Choice())


@pytest.fixture
def files(make_config, tmp_path, monkeypatch) -> tuple[Path, Path]:
    config = make_config(rewards=[RewardSpec(name="trainer_toys:bright", batch_size=0)])
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))))
    return file, tmp_path / "probe"


def words(file: Path, out: Path, *more: str) -> list[str]:
    small = "--probe.prompts 5 --probe.members 24 --batch.micro_batch 24 --probe.steps [1,2] --probe.etas [0.2]"
    return ["--config", str(file), "--probe.out", str(out), "--kernel.name", "sage_exact", *small.split(), *more]


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        (["--probe.members", "10"], "probe.members must be 8, 12, 16, ..., got 10"),
        (["--probe.prompts", "9"], "has only 5 prompts"),
        (["--probe.steps", "[7]"], "names step 7, but with rollout.steps 5 it may be 0, 1, 2, 3"),
        (["--kernel.name", "cps", "--probe.etas", "[1.5]"], "eta"),
        (["--rewards", '[{"name": "trainer_toys:flat"}]'], "the same for all clips"),
        (["--run", "somewhere", "--recipe", "shapes/sage"], "choose one of them"),
    ],
)
def test_nonsense_is_refused(more, answer, files, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere" / "config.yaml").write_text("seed: 1\n")
    file, out = files
    assert main(["probe", *words(file, out, *more)]) == 2
    assert answer in capsys.readouterr().err
    assert not (out / "probe.json").exists()


@pytest.mark.parametrize(
    ("kernel", "eta", "others"),
    [("sage_exact", math.sqrt(2), [math.sqrt(2) / 2]), ("sage", 1.0, [0.5, 1.5]), ("cps", 0.8, [0.4])],
)
def test_no_eta_is_tried_by_itself_that_its_own_kernel_would_warn_of(kernel, eta, others, recwarn) -> None:
    config = replace(recipe("shapes/branch"), kernel=KernelSpec(name=kernel, eta=eta))
    found = module.chosen_etas(config, ProbeSpec())
    assert found == others
    for value in found:
        replace(config.kernel, eta=value)
    assert not recwarn.list
    assert module.chosen_etas(config, ProbeSpec(etas=[2.5])) == [2.5]  # what is asked for is tried
