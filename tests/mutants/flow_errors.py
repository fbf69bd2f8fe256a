"""Errors in the mathematics of sampling."""

from __future__ import annotations

from mutants.mutant import Mutant

LAWS = "flow/test_kernels.py::"
ORACLES = "flow/test_kernel_oracles.py::"
VARIANCE = (f"{ORACLES}test_final_variance_of_unit_gaussian_data",)
GAUSSIAN = ("test_gaussian.py",)

MUTANTS = (
    Mutant(
        "flow divides by 1 - sigma_next at every step",
        "flow/kernels.py",
        "1.0 - torch.where(p == 1.0, q, p)",
        "1.0 - q",
        VARIANCE,
    ),
    Mutant(
        "dance has eta where it needs eta squared",
        "flow/kernels.py",
        "_ito(p, q, self.eta**2 * (p - q), dtype)",
        "_ito(p, q, self.eta * (p - q), dtype)",
        VARIANCE,
    ),
    Mutant(
        "sage clamps one end of the interval only",
        "flow/kernels.py",
        """        p_clamped, q_clamped = p.clamp(max=self.sigma_max), q.clamp(max=self.sigma_max)
        length = p_clamped - q_clamped
        # Clamping only one end makes the integral negative, hence NaN, whenever sigma_next > sigma_max.
        w = self.eta**2 * (torch.log1p(length / (1.0 - p_clamped)) - length)
        return _ito(p, q, w.clamp(min=0.0), dtype)
""",
        """        p_clamped = p.clamp(max=self.sigma_max)
        length = p_clamped - q
        w = self.eta**2 * (torch.log1p(length / (1.0 - p_clamped)) - length)
        return _ito(p, q, w, dtype)
""",
        ("test_known_errors.py::test_official_one_sided_clamp_is_nan_for_a_large_shift_with_many_steps",),
    ),
    Mutant(
        "sage_exact clamps one end of the interval only",
        "flow/kernels.py",
        "p_clamped, q_clamped = p.clamp(max=limit), q.clamp(max=limit)",
        "p_clamped, q_clamped = p.clamp(max=limit), q",
        (f"{LAWS}test_sage_exact_renews_all_noise_at_sigma_one_and_its_clamp_does_not",),
    ),
    Mutant(
        "sage leaves the linear part out of its integral",
        "flow/kernels.py",
        "(torch.log1p(length / (1.0 - p_clamped)) - length)",
        "torch.log1p(length / (1.0 - p_clamped))",
        (f"{LAWS}test_sage_integrates_the_diffusion_of_flow_exactly",),
    ),
    Mutant(
        "the drift correction of the Ito family has the wrong sign",
        "flow/kernels.py",
        "(q - p) - half * (1.0 - p), torch.sqrt(w)",
        "(q - p) + half * (1.0 - p), torch.sqrt(w)",
        (f"{LAWS}test_ito_kernels_correct_the_drift_by_half_the_variance_times_the_score",),
    ),
    Mutant(
        "the drift correction of the Ito family is taken at sigma_next",
        "flow/kernels.py",
        "half = w / (2.0 * p)",
        "half = w / (p + q)",
        (f"{LAWS}test_ito_kernels_correct_the_drift_by_half_the_variance_times_the_score",),
    ),
    Mutant(
        "the coefficient-preserving family swaps sigma and sigma_next",
        "flow/kernels.py",
        "(q - p) - (1.0 - p) * renewed",
        "(q - p) - (1.0 - q) * renewed",
        (f"{LAWS}test_coefficient_preserving_kernels_keep_the_mixture",),
    ),
    Mutant(
        "cps swaps sine and cosine",
        "flow/kernels.py",
        "torch.cos(angle), torch.sin(angle)",
        "torch.sin(angle), torch.cos(angle)",
        (*VARIANCE, f"{LAWS}test_without_exploration_every_kernel_is_the_euler_step_bit_for_bit"),
    ),
    Mutant(
        "sage_exact has eta squared instead of half of it",
        "flow/kernels.py",
        "rate = self.eta**2 / 2",
        "rate = self.eta**2",
        VARIANCE,
    ),
    Mutant(
        "the shift leaves sigma 1 elsewhere",
        "flow/schedule.py",
        "(shift * s / (1.0 + (shift - 1.0) * s))",
        "(shift * s / (1.0 + shift * s))",
        ("flow/test_schedule.py",),
    ),
    Mutant(
        "the last step keeps its noise although it was to be deterministic",
        "flow/schedule.py",
        "flags[-1] = False",
        "flags[-1] = flags[-1]",
        ("flow/test_schedule.py",),
    ),
    Mutant(
        "new steps around a window start one sigma late",
        "flow/schedule.py",
        "_respaced(self.sigmas[: first + 1], before)",
        "_respaced(self.sigmas[: first + 2], before)",
        ("flow/test_solvers.py",),
    ),
    Mutant(
        "the score divides by 1 - sigma, as the paper's Eq. 3 does",
        "flow/path.py",
        "return -predicted_eps(x, v, sigma) / sigma",
        "return -predicted_eps(x, v, sigma) / (1 - sigma)",
        ("flow/test_path.py",),
    ),
    Mutant(
        "the sensitivity leaves out |b|, as the paper's Eq. 8 does",
        "flow/transition.py",
        "return self.b.abs() / self.std",
        "return 1.0 / self.std",
        ("test_known_errors.py::test_paper_eq8_leaves_out_b_so_one_over_std_is_not_the_gradient",),
    ),
    Mutant(
        "ab2 subtracts its correction",
        "flow/solvers.py",
        "return euler + (0.5 * h * h / h_before)",
        "return euler - (0.5 * h * h / h_before)",
        ("flow/test_solvers.py",),
    ),
    Mutant(
        "ab2 takes all steps for equally long",
        "flow/solvers.py",
        "(0.5 * h * h / h_before)",
        "(0.5 * h)",
        ("flow/test_solvers.py",),
    ),
    Mutant(
        "a sliding window moves in every iteration",
        "flow/windows.py",
        "places[(iteration // self.every) % len(places)]",
        "places[iteration % len(places)]",
        ("flow/test_windows.py",),
    ),
    Mutant(
        "a window is one step longer than asked",
        "flow/windows.py",
        "first <= index < first + self.size for",
        "first <= index <= first + self.size for",
        ("flow/test_windows.py",),
    ),
    Mutant(
        "drawn windows ignore their weights",
        "flow/windows.py",
        "weights = self.weights or [1.0] * len(allowed)",
        "weights = [1.0] * len(allowed)",
        ("flow/test_windows.py",),
    ),
    Mutant(
        "drawn windows give every prompt the same steps in every iteration",
        "flow/windows.py",
        "        draw.shuffle(rows)\n",
        "",
        ("flow/test_windows.py",),
    ),
    Mutant(
        "noise does not depend on the last part of its key",
        "flow/noise.py",
        '"/".join(map(str, key))',
        '"/".join(map(str, key[:-1]))',
        ("train/test_trainer_presets.py::test_members_of_a_group_start_from_the_same_noise_only_when_asked",),
    ),
    Mutant(
        "the log-probability is a sum over dimensions",
        "gaussian.py",
        "values.flatten(self.batch_ndim).mean(-1)",
        "values.flatten(self.batch_ndim).sum(-1)",
        GAUSSIAN,
    ),
    Mutant(
        "the log-probability lacks its normalisation",
        "gaussian.py",
        "return -0.5 * quadratic - log_normaliser",
        "return -0.5 * quadratic",
        GAUSSIAN,
    ),
    Mutant(
        "samples are spread by the variance",
        "gaussian.py",
        "return self.mean + self._spread(self.std) * noise",
        "return self.mean + self._spread(self.std.square()) * noise",
        GAUSSIAN,
    ),
    Mutant(
        "the KL divides by its own variance instead of the other's",
        "gaussian.py",
        "((self.mean - other.mean) / self._spread(std_other))",
        "((self.mean - other.mean) / self._spread(std))",
        GAUSSIAN,
    ),
)
