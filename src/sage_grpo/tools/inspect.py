"""Properties of a kernel and a schedule, known before any network runs.

Everything here follows from the three scalars (a, b, std) of each step. For Gaussian data with variance c the perfect
velocity is linear in x, so the variance of a whole rollout is a scalar recursion: c = 0 is a direction normal to the data
manifold (variance left there is noise in the video), c = 1 a direction along it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo.objectives.policy_gradient import equalizing_weights
from sage_grpo.samplers.kernels import EXACT, KERNELS, Cps, Flow, Kernel, Ode
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.sde_steps import swallowed
from sage_grpo.samplers.transition import Transition

SPAN_LIMIT = 100.0  # equalizer weights that differ by more than this need a cap
PROPORTION = 2.0
"""A step whose noise, or whose factor on x, is more than this multiple of its neighbors' mean is reported."""
CONVERGES = 0.97
"""A kernel whose variance tends to less converges to a wrong law; a large amplification reveals one that explodes."""
CLOSE = 0.05  # kernels that keep the mixture exact end this close to the ODE's variance, or get a warning


@dataclass(frozen=True)
class StepRow:
    """One step of a rollout."""

    step: int  # index, from 0 at the noise end
    sigma: float
    sigma_next: float
    std: float  # standard deviation of the injected noise; 0 for a deterministic step
    sensitivity: float | None
    """|b| / std, the size of d(log-prob)/dv up to a constant; None where the step is not trained."""
    weight: float | None  # equalizer weight; None where the step is not trained
    share: float  # part of the total injected variance, 0 to 1


@dataclass(frozen=True)
class KernelReport:
    """A kernel on a schedule: rows per step and totals."""

    kernel: str  # name as in a config file
    eta: float | None  # exploration scale; None for the ODE
    rows: tuple[StepRow, ...]
    total_variance: float  # sum of std^2 over the rollout
    off_manifold_variance: float
    """Final variance for point data (c = 0): noise left in the video by a perfect network."""
    on_manifold_variance: float  # final variance for data of variance 1 (c = 1): 1 is right
    peak_excess: float
    """Largest ratio of the noise variance that the network meets to the one that it was trained for (c = 0); 1 is right."""
    sensitivity_span: float | None
    """Largest over smallest sensitivity of the trained steps; None without trained steps."""
    warnings: tuple[str, ...]


def kernel_name(kernel: Kernel) -> str:
    return next((name for name, kind in KERNELS.items() if type(kernel) is kind), type(kernel).__name__)


def transitions(kernel: Kernel, schedule: Schedule) -> Transition:
    """All steps in float64: the kernel where the schedule explores, the ODE elsewhere."""
    return _transitions(kernel, schedule.sigmas.to(torch.float64), schedule.stochastic)


def variances(kernel: Kernel, schedule: Schedule, data_variance: float) -> list[float]:
    """Variance of x after every step, for Gaussian data of this variance and the perfect velocity."""
    return _variances(transitions(kernel, schedule), schedule.sigmas.to(torch.float64), data_variance)


def final_variance(kernel: Kernel, schedule: Schedule, data_variance: float) -> float:
    """Variance of the finished sample; `data_variance` itself would be right."""
    return variances(kernel, schedule, data_variance)[-1]


def inspect_kernel(kernel: Kernel, schedule: Schedule) -> KernelReport:
    step = transitions(kernel, schedule)
    trained = step.std > 0
    sensitivity = step.sensitivity
    weights = torch.full_like(step.std, math.nan)
    if bool(trained.any()):
        weights[trained] = equalizing_weights(sensitivity[trained]).to(torch.float64)
    variance = step.std.square()
    total = float(variance.sum())
    sigmas = schedule.sigmas.tolist()
    rows = tuple(
        StepRow(
            step=index,
            sigma=sigmas[index],
            sigma_next=sigmas[index + 1],
            std=float(step.std[index]),
            sensitivity=float(sensitivity[index]) if trained[index] else None,
            weight=float(weights[index]) if trained[index] else None,
            share=float(variance[index]) / total if total > 0 else 0.0,
        )
        for index in range(schedule.num_steps)
    )
    return KernelReport(
        kernel=kernel_name(kernel),
        eta=None if isinstance(kernel, Ode) else kernel.eta,  # type: ignore[attr-defined]
        rows=rows,
        total_variance=total,
        off_manifold_variance=final_variance(kernel, schedule, 0.0),
        on_manifold_variance=final_variance(kernel, schedule, 1.0),
        peak_excess=_peak_excess(kernel, schedule),
        sensitivity_span=_span(sensitivity[trained]),
        warnings=tuple(warnings(kernel, schedule)),
    )


def warnings(kernel: Kernel, schedule: Schedule) -> list[str]:
    """Reasons why this schedule makes this kernel unstable or useless, with remedies."""
    if isinstance(kernel, Ode):
        return []
    step = transitions(kernel, schedule)
    if not bool((step.std > 0).any()):
        return [
            "No step explores (std = 0 everywhere), so there is nothing to train: raise eta, widen the window, or take more steps."
        ]
    return [*instabilities(kernel, schedule), *_drawbacks(kernel, schedule, step)]


def instabilities(kernel: Kernel, schedule: Schedule) -> Iterator[str]:
    """The warnings about samples that leave the data."""
    step, clamp, steps = transitions(kernel, schedule), getattr(kernel, "sigma_max", None), swallowed(kernel, schedule)
    # They are the first of the grid. A window with the step after them was meant to include them; a later one was not.
    if clamp is not None and steps and any(schedule.stochastic[: steps[-1] + 2]):
        inside = torch.zeros(schedule.num_steps, dtype=torch.bool)
        inside[list(steps)] = True
        yield (
            f"The clamp sigma_max = {clamp:g} swallows {_listed(inside)}: sigma_next is above it, so std = 0 there "
            "and nothing is learned. Take fewer steps, a smaller shift, a larger sigma_max, or sage_exact, which needs no clamp."
        )
    gain = step.a + step.b / schedule.sigmas[:-1].to(torch.float64)
    grows = gain.abs() > 1 + 1e-9
    if bool(grows.any()):
        yield (
            f"Errors off the data manifold grow at {_listed(grows)} (by up to {float(gain.abs().max()):.3g} a step): the drift "
            "correction overshoots, and more steps make it worse. Lower eta, explore in a window at high sigma only, take "
            "fewer steps, or take sage_exact."
        )
    if bool((step.a < 0).any()):
        yield (
            f"The coefficient a of x is negative at {_listed(step.a < 0)} (down to {float(step.a.min()):.3g}): the step flips the "
            "sign of its own input. Lower eta, or take more steps."
        )
    if kernel.leaves_noise:
        yield from _out_of_proportion(kernel, step)
    excess = _peak_excess(kernel, schedule)
    if not excess <= 1.5:  # here and below: NaN is reported, too
        yield (
            f"During sampling the state holds up to {excess:.3g} times the noise variance that the network was trained for. Lower eta, "
            f"leave rollout.deterministic_last out, let the last steps be deterministic with a window, or take {EXACT}, which keep it at 1."
        )
    limit, found = _limit(kernel, schedule), final_variance(kernel, schedule, 1.0)
    if not limit > CONVERGES:
        advice = "Take sage_exact, or a smaller eta." if isinstance(kernel, Cps) else "Lower eta."
        yield (
            f"The variance of the data does not converge: it is {found:.3f} here and tends to {limit:.3f} with more and more "
            f"steps, where 1 is right. Videos lose contrast and variety. {advice}"
        )
    if not found <= 1.1:
        yield (
            f"Along the data manifold the samples have {found:.3g} times the variance of the data (1 is right): the injected "
            "noise is not removed again. Lower eta, take more steps, or make the last steps deterministic."
        )


def _drawbacks(kernel: Kernel, schedule: Schedule, step: Transition) -> Iterator[str]:
    if not kernel.leaves_noise:
        yield from _out_of_proportion(kernel, step)
    if float(schedule.sigmas[-1]) == 0 and float(step.std[-1]) > 0:
        yield (
            f"The last step ends at sigma = 0 and is stochastic: noise with std {float(step.std[-1]):.3g} stays in the video, "
            f"and the reward judges it. Set deterministic_last, or take {EXACT}."
        )
    trained, variance = step.std > 0, step.std.square()
    index = int(variance.argmax())
    share = float(variance[index] / variance.sum())
    # The coefficient-preserving kernels renew existing noise: a large share does no harm.
    if share > 0.4 and kernel.leaves_noise and int(trained.sum()) >= 3:
        cause = " (its diffusion is infinite at sigma = 1, so it borrows sigma_1's)" if isinstance(kernel, Flow) else ""
        later = ", or start the window one step later" if index == 0 else ""
        yield (
            f"Step {index} injects {share:.0%} of all variance{cause}: exploration happens nearly at once. Lower the shift, or "
            f"take more steps{later}."
        )
    sensitivity = step.sensitivity[trained]
    span = _span(sensitivity)
    if span is not None and not span <= SPAN_LIMIT:
        steps = trained.nonzero()[:, 0]
        least, most = int(steps[sensitivity.argmin()]), int(steps[sensitivity.argmax()])
        yield (
            f"Equalizer weights span {span:.0f}x, from step {most} up to step {least}: steps with large weights then carry mostly noise. Cap "
            f"the weights, or train a window that leaves out step {least} or step {most}."
        )
    # Kernels that keep the mixture exact lose variance all the same where a step renews much of the noise with the velocity of its start.
    found, plain = final_variance(kernel, schedule, 1.0), final_variance(Ode(), schedule, 1.0)
    if not kernel.leaves_noise and _limit(kernel, schedule) > CONVERGES and found < (1 - CLOSE) * plain:
        yield (
            f"Along the data manifold the samples have {found / plain:.2f} times the variance that the ODE gives on this grid: take more "
            "steps, lower eta, or let fewer steps explore."
        )


def _transitions(kernel: Kernel, sigmas: Tensor, stochastic: tuple[bool, ...]) -> Transition:
    explores = torch.tensor(stochastic)
    noisy, plain = kernel(sigmas[:-1], sigmas[1:]), Ode()(sigmas[:-1], sigmas[1:])
    return Transition(
        a=torch.where(explores, noisy.a, plain.a),
        b=torch.where(explores, noisy.b, plain.b),
        std=torch.where(explores, noisy.std, plain.std),
    )


def _variances(step: Transition, sigmas: Tensor, c: float) -> list[float]:
    p = sigmas[:-1]
    # v = E[eps - x0 | x] = (covariance / marginal) x for data N(0, c); one division, so that an exact 0 stays exact
    marginal, covariance = (1 - p) ** 2 * c + p**2, p - (1 - p) * c
    gains = (step.a * marginal + step.b * covariance) / marginal
    first = float(sigmas[0])
    values, variance = [], (1 - first) ** 2 * c + first**2
    for gain, std in zip(gains.tolist(), step.std.tolist()):
        variance = gain**2 * variance + std**2
        values.append(variance)
    return values


def _peak_excess(kernel: Kernel, schedule: Schedule) -> float:
    """Over the states that a network gets as input: all but the last."""
    expected = schedule.sigmas[1:-1].to(torch.float64).square().tolist()
    return max([1.0, *(v / e for v, e in zip(variances(kernel, schedule, 0.0), expected))])


def _span(values: Tensor) -> float | None:
    return float(values.max() / values.min()) if len(values) else None


def _listed(flags: Tensor) -> str:
    steps = flags.nonzero()[:, 0].tolist()
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"


def _out_of_proportion(kernel: Kernel, step: Transition) -> Iterator[str]:
    """Steps with a value above PROPORTION times the mean of those before and after it that explore, too."""
    explores, found = (step.std > 0).tolist(), []
    for words, values in (("noise of std", step.std.tolist()), ("a factor on x of", step.a.abs().tolist())):
        for index, value in enumerate(values):
            beside = [values[i] for i in (index - 1, index + 1) if 0 <= i < len(values) and explores[i]]
            mean = sum(beside) / len(beside) if explores[index] and beside else math.inf
            if value > PROPORTION * mean:
                found.append(f"step {index} has {words} {value:.3g}, its neighbors {mean:.3g}")
    advice = "The mixture stays exact, so that this harms no clip; but members of a group part mostly there."
    if kernel.leaves_noise:
        advice = "Take more steps, lower eta, leave such a step out with a window, or take sage_exact."
    if found:
        yield f"Out of proportion: {'; '.join(found)}. {advice}"


def _limit(kernel: Kernel, schedule: Schedule) -> float:
    """The limit of the variance of unit data with more and more steps: every kernel is of first order, so two fine grids suffice (Richardson)."""
    sigmas = schedule.sigmas.to(torch.float64)

    def refined(parts: int) -> float:
        fractions = torch.arange(parts, dtype=torch.float64) / parts
        fine = torch.cat([(sigmas[:-1, None] + fractions * sigmas.diff()[:, None]).flatten(), sigmas[-1:]])
        flags = tuple(flag for flag in schedule.stochastic for _ in range(parts))
        return _variances(_transitions(kernel, fine, flags), fine, 1.0)[-1]

    parts = max(16, math.ceil(400 / schedule.num_steps))
    return 2 * refined(2 * parts) - refined(parts)
