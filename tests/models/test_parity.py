"""A rollout without noise is the diffusers pipeline: same grid, latents and video, for every supported pipeline.

The pipelines run as a user runs them: they choose their own sigmas, and we must come to the same ones.
"""

from __future__ import annotations

import diffusers
import pytest
import torch
from PIL import Image
from stock_run import (
    CLOSE,
    LAST,
    LONG,
    PICTURE,
    PROMPTS,
    SLOW,
    assert_same_pixels,
    conditions_of,
    fields_of,
    slow,
    start,
    stock,
)

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.policy import Policy, build_solver, integrate, solve
from sage_grpo.models.schedulers import own_sigmas
from sage_grpo.models.spec import ModelSpec
from sage_grpo.plan.architecture import find_architecture
from sage_grpo.plan.published import PUBLISHED
from sage_grpo.samplers.kernels import Ode, SageExact
from sage_grpo.samplers.schedule import Schedule

QUICK = (*("hunyuan15_t2v", "wan_t2v", "wan_i2v"), *("ltx", "flux", "flux2", "sd3", "qwen_image", "z_image"))


def load(folder, kind: str, scale: float | None):
    return ModelSpec(path=str(folder), cache=None, **fields_of(kind, scale)).load("cpu")


@pytest.mark.parametrize("kind", [*QUICK, *slow(*(kind for kind in (*tiny.KINDS, *tiny.OTHERS) if kind not in QUICK))])
@pytest.mark.usefixtures("in_double")
def test_ode_rollout_is_the_pipeline(kind: str, checkpoint, model) -> None:
    scale, prompts = 1.0 if kind == "flux2_distilled" else 4.0, LONG if kind in tiny.OTHERS else PROMPTS
    ours, steps = model(kind, **fields_of(kind, scale)), 2
    x, grid = start(ours), ours.sigmas(steps)
    run = stock(checkpoint(kind), kind, x, scale, prompts, steps)
    torch.testing.assert_close(grid, run.sigmas.float(), rtol=0, atol=1e-6)

    conditions = conditions_of(ours, kind, prompts)
    y = solve(ours, build_solver(ours, "checkpoint", steps), x, conditions)
    torch.testing.assert_close(y, run.latents, **CLOSE)
    if kind in tiny.KINDS:
        y = integrate(Policy(ours, Ode(), Schedule(grid)), x, conditions)
        torch.testing.assert_close(y, run.latents, **CLOSE)
    planned = find_architecture(ours.spec)  # what `sage-grpo plan` knows of it without reading weights
    torch.testing.assert_close(planned.grid(7).sigmas, ours.sigmas(7), **CLOSE)
    assert planned.guidance_scale == (1.0 if ours.guidance.embedded else ours.guidance_scale)
    # Prompts and guidance matter by far more than that, so the tolerance proves something.
    with torch.no_grad():
        v, other = (ours.velocity(x, grid[1], rows) for rows in (conditions, conditions[::-1]))
        unguided = ours.velocity(x, grid[1], conditions, guidance=1.0)
    assert (v - other).abs().max() > 1e-3
    assert (v - unguided).abs().max() > (1e-3 if scale != 1 else -1)

    # The VAE gets the pipeline's own numbers, scaled once.
    torch.testing.assert_close(ours.codec.to_vae(run.latents).reshape(run.z.shape), run.z, rtol=0, atol=1e-6)
    assert_same_pixels(ours.decode(run.latents), run.video)


@pytest.mark.parametrize("kind", slow("wan_flf2v", "wan22_i2v"))
@pytest.mark.usefixtures("in_double")
def test_first_and_last_frame_are_the_pipelines(kind: str, checkpoint, model) -> None:
    """Wan 2.1 FLF2V, and 2.2 I2V with a last image."""
    ours = model(kind, **fields_of(kind, 4.0))
    x = start(ours)
    run = stock(checkpoint(kind), kind, x, 4.0, PROMPTS, last_image=Image.fromarray(LAST.numpy()))
    policy = Policy(ours, Ode(), Schedule(ours.sigmas(3)))
    y, other = (
        integrate(policy, x, ours.encode(PROMPTS, [torch.stack([PICTURE, last])] * 2)) for last in (LAST, PICTURE)
    )
    torch.testing.assert_close(y, run.latents, **CLOSE)
    assert (y - other).abs().max() > 1e-4


DPM = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "algorithm_type": "dpmsolver++",
}
SOLVERS = [
    ("wan_t2v", tiny.unipc()),
    pytest.param("wan22_5b_i2v", tiny.unipc(), marks=SLOW),
    pytest.param("wan_i2v", diffusers.DPMSolverMultistepScheduler(**DPM), marks=SLOW),
    pytest.param("hunyuan15_t2v", tiny.unipc(), marks=SLOW),
]


@pytest.mark.parametrize(("kind", "scheduler"), SOLVERS)
@pytest.mark.usefixtures("in_double")
def test_checkpoint_solver_is_the_pipeline(kind: str, scheduler, checkpoint, tmp_path) -> None:
    folder = tiny.variant(checkpoint(kind), tmp_path / kind, scheduler=scheduler)
    ours = load(folder, kind, 4.0)
    x, conditions = start(ours), conditions_of(ours, kind, PROMPTS)
    latents = stock(folder, kind, x, 4.0, PROMPTS, steps=4).latents
    for _ in range(2):  # a second sampling knows nothing of the first
        y = solve(ours, build_solver(ours, "checkpoint", 4), x, conditions)
        torch.testing.assert_close(y, latents, **CLOSE)
    euler = solve(ours, build_solver(ours, "euler", 4), x, conditions)
    assert torch.equal(euler, integrate(Policy(ours, Ode(), Schedule(ours.sigmas(4))), x, conditions))
    assert (euler - latents).abs().max() > 1e-3


def test_solvers_run_in_order_and_once(model) -> None:
    ours = model("wan_t2v", guidance_scale=1.0)
    solver, x = build_solver(ours, "checkpoint", 3), torch.zeros(1, *ours.latent_shape())
    still = lambda x, sigma, timestep: torch.zeros_like(x)  # noqa: E731
    with pytest.raises(ValueError, match="Step 1 was asked for after 0 steps"):
        solver.step(1, x, still)
    for index in range(3):
        solver.step(index, x, still)
    with pytest.raises(ValueError, match="Step 0 was asked for after 3 steps"):
        solver.step(0, x, still)


@pytest.mark.usefixtures("in_double")
def test_a_shift_of_ones_own(checkpoint, model, tmp_path) -> None:
    kind = "wan_t2v"
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)
    folder = tiny.variant(checkpoint(kind), tmp_path / kind, scheduler=scheduler)
    plain = model(kind, **fields_of(kind, 1.0))
    set_once = model(kind, **fields_of(kind, 1.0), shift=2.0)
    x, conditions = start(plain), conditions_of(plain, kind, PROMPTS)
    latents = stock(folder, kind, x, 1.0, PROMPTS).latents
    for solver in ("euler", "checkpoint"):
        for ours, shift in ((plain, 2.0), (set_once, None)):
            y = solve(ours, build_solver(ours, solver, 3, shift), x, conditions)
            torch.testing.assert_close(y, latents, **CLOSE)
    assert not torch.equal(plain.sigmas(3), set_once.sigmas(3))


def test_multistep_grid_is_the_schedulers_own_and_starts_at_pure_noise(checkpoint, tmp_path) -> None:
    scheduler = tiny.unipc()
    ours = load(tiny.variant(checkpoint("wan_t2v"), tmp_path / "wan", scheduler=scheduler), "wan_t2v", None)
    scheduler.set_timesteps(20)
    sigmas = ours.sigmas(20)
    assert ours.shift == 3.0
    assert sigmas[0] == 1  # where the scheduler has 1 - 1e-6, at which kernels would explode
    assert torch.equal(sigmas[1:], scheduler.sigmas[1:])
    assert sigmas[-1] == 0


def test_a_grid_between_two_ends_needs_two_steps() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift_terminal=0.1)
    assert own_sigmas(scheduler, 2, 3.0, even=True).tolist() == pytest.approx([1.0, 0.1, 0.0])
    with pytest.raises(ModelError, match="at least 2 here, got 1"):
        own_sigmas(scheduler, 1, 3.0, even=True)


@pytest.mark.usefixtures("in_double")
def test_second_guidance_scale_is_the_pipelines(checkpoint, model) -> None:
    kind = "wan22_t2v"
    ours = model(kind, **fields_of(kind, 4.0), guidance_scale_2=2.0)
    x = start(ours)
    run = stock(checkpoint(kind), kind, x, 4.0, PROMPTS, guidance_scale_2=2.0)
    y = solve(ours, build_solver(ours, "euler", 3), x, conditions_of(ours, kind, PROMPTS))
    torch.testing.assert_close(y, run.latents, **CLOSE)


def test_5b_image_stays_and_only_the_rest_is_trained(model) -> None:
    ours = model("wan22_5b_i2v", guidance_scale=1.0)
    conditions = ours.encode(["a cat"], [tiny.image(3)])
    frame = conditions[0].tensors["condition"]
    x = torch.randn(1, *ours.latent_shape())
    v = ours.velocity(x, torch.tensor(0.7), conditions)
    torch.testing.assert_close((x - 0.7 * v)[0, :, :1], frame)
    gradient = torch.autograd.grad(
        v[:, :, :1].sum(), list(ours.trainable().values()), retain_graph=True, allow_unused=True
    )
    assert all(part is None or not part.any() for part in gradient)
    # The network never sees what noise the first frame holds.
    x[:, :, 0] += 1
    assert torch.equal(ours.velocity(x, torch.tensor(0.7), conditions)[:, :, 1:], v[:, :, 1:])
    explored = Policy(ours, SageExact(), Schedule(ours.sigmas(4)))
    y = integrate(explored, x, conditions, lambda index: torch.randn_like(x))
    torch.testing.assert_close(y[0, :, :1], frame)
    told = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        run = ours._run
        patch.setattr(
            ours, "_run", lambda x, sigma, timestep, inputs: told.append(timestep) or run(x, sigma, timestep, inputs)
        )
        ours.velocity(x, torch.tensor(0.7), conditions)
    assert told[0].tolist() == [[0.0] * 4 + [700.0] * 4]


def test_what_a_plan_knows_of_published_checkpoints() -> None:
    facts = {
        "HunyuanVideo-1.5-Diffusers-480p_t2v": (5.0, 6.0, None),
        "HunyuanVideo-1.5-Diffusers-720p_t2v": (9.0, 6.0, None),
        "Wan2.1-T2V-14B-Diffusers": (3.0, None, None),
        "Wan2.2-T2V-A14B-Diffusers": (3.0, None, 0.875),
        "Wan2.2-TI2V-5B-Diffusers": (5.0, None, None),
        "stable-diffusion-3.5-large": (3.0, None, None),
        "stable-diffusion-3.5-medium": (3.0, None, None),
    }
    for name, fact in facts.items():
        known = PUBLISHED[name]
        shift = known.scheduler.get("flow_shift", known.scheduler.get("shift"))
        assert (shift, known.guidance, known.boundary) == fact, name


def test_two_experts_share_the_noise_range(model) -> None:
    high, low = model("wan22_t2v", guidance_scale=1.0), model("wan22_t2v", guidance_scale=1.0, expert="low")
    x = torch.randn(1, *high.latent_shape())
    condition = high.encode(["a cat"])
    for sigma, expert in ((0.9, high), (0.8, high), (0.79, low), (0.1, low)):
        sigma = torch.tensor(sigma)
        assert torch.equal(high.velocity(x, sigma, condition), low.velocity(x, sigma, condition))
        assert [high.trains(sigma), low.trains(sigma)] == [expert is high, expert is low]
        v = expert.velocity(x, sigma, condition)
        assert v.requires_grad
        assert not (low if expert is high else high).velocity(x, sigma, condition).requires_grad
    schedule = Schedule.shifted(6, 1.0)
    both = [[step for step in range(6) if m.trains(schedule.pair(step)[0])] for m in (high, low)]
    assert both == [[0, 1], [2, 3, 4, 5]]


def test_rollouts_and_solvers_visit_the_levels_that_are_stated(model) -> None:
    levels, kind = [1.0, 0.875, 0.75, 0.5], "wan_t2v"
    ours = model(kind, sigmas=levels)
    assert ours.sigmas(4).tolist() == [*levels, 0.0]
    visited = []

    def velocity(x, sigma):
        visited.append(float(sigma))
        return torch.zeros_like(x)

    solver = build_solver(ours, "euler", 4)
    for step in range(solver.num_steps):
        solver.step(step, torch.zeros(1), velocity)
    assert visited == levels
    assert model(kind).sigmas(4).tolist() != ours.sigmas(4).tolist()
    for steps, shift in ((5, None), (4, 3.0)):
        with pytest.raises(ModelError, match=r"model\.sigmas"):
            ours.sigmas(steps, shift)
    with pytest.raises(ModelError, match=r"model\.sigmas"):
        build_solver(ours, "checkpoint", 4)
