"""Errors in the mathematics of learning."""

from __future__ import annotations

from mutants.mutant import Mutant

ADVANTAGE = ("rl/test_advantage.py",)
EQUALIZER = ("rl/test_equalizer.py",)
SURROGATE = ("rl/test_surrogate.py",)
REGION = ("rl/test_trust_region.py",)
KL = ("rl/test_kl_control.py",)

MUTANTS = (
    Mutant(
        "advantages divide by the sample's std instead of the population's",
        "rl/advantage.py",
        "variance = _group_sum(centred.square(), index, len(count)) / count.clamp(min=1)",
        "variance = _group_sum(centred.square(), index, len(count)) / (count - 1).clamp(min=1)",
        ADVANTAGE,
    ),
    Mutant(
        "masked members count in the mean of their group",
        "rl/advantage.py",
        "count = _group_sum(ok.to(torch.float64), index, len(ids))",
        "count = size.to(torch.float64)",
        ADVANTAGE,
    ),
    Mutant(
        "masked members count in the global std",
        "rl/advantage.py",
        "((centred.square().sum() / ok.sum()).sqrt() + eps)",
        "((centred.square().sum() / len(ok)).sqrt() + eps)",
        ADVANTAGE,
    ),
    Mutant(
        "advantages are clipped at one end only",
        "rl/advantage.py",
        "advantage = advantage.clamp(-clip, clip)",
        "advantage = advantage.clamp(max=clip)",
        ADVANTAGE,
    ),
    Mutant(
        "decoupled advantages ignore the weights of the rewards",
        "rl/advantage.py",
        "terms = [w * group_advantage(",
        "terms = [group_advantage(",
        ADVANTAGE,
    ),
    Mutant(
        "decoupled advantages are not normalised over the batch",
        "rl/advantage.py",
        "    total = total / ((total.square().sum() / ok.sum()).sqrt() + eps)\n",
        "",
        ADVANTAGE,
    ),
    Mutant(
        "decoupled advantages are not clipped",
        "rl/advantage.py",
        "return total if clip is None else total.clamp(-clip, clip)",
        "return total",
        ADVANTAGE,
    ),
    Mutant(
        "the equaliser takes the mean for the median",
        "rl/equalizer.py",
        "torch.quantile(sensitivity.to(torch.float64), 0.5)",
        "sensitivity.to(torch.float64).mean()",
        EQUALIZER,
    ),
    Mutant(
        "the equaliser is upside down",
        "rl/equalizer.py",
        "weights = median / sensitivity.to(torch.float64)",
        "weights = sensitivity.to(torch.float64) / median",
        EQUALIZER,
    ),
    Mutant(
        "the equaliser's cap is a floor",
        "rl/equalizer.py",
        "weights.clamp(max=cap)",
        "weights.clamp(min=cap)",
        EQUALIZER,
    ),
    Mutant(
        "the surrogate takes the larger of its two terms",
        "rl/surrogate.py",
        "-torch.minimum(ratio * advantage, bounded * advantage)",
        "-torch.maximum(ratio * advantage, bounded * advantage)",
        SURROGATE,
    ),
    Mutant(
        "the ratio is clipped at one end only",
        "rl/surrogate.py",
        "ratio.clamp(1.0 - clip, 1.0 + clip)",
        "ratio.clamp(max=1.0 + clip)",
        SURROGATE,
    ),
    Mutant(
        "the clip range falls as 1 / D",
        "rl/surrogate.py",
        "return c / math.sqrt(dims)",
        "return c / dims",
        SURROGATE,
    ),
    Mutant(
        "the KL mask drops every move that is far, also those that come back",
        "rl/surrogate.py",
        "inactive = (kl.detach() >= tau) & aggressive",
        "inactive = kl.detach() >= tau",
        SURROGATE,
    ),
    Mutant(
        "the centred ratio has the wrong sign",
        "rl/surrogate.py",
        "return log_ratio + kl.detach()",
        "return log_ratio - kl.detach()",
        SURROGATE,
    ),
    Mutant(
        "the centred ratio adds the gradient of the KL",
        "rl/surrogate.py",
        "return log_ratio + kl.detach()",
        "return log_ratio + kl",
        SURROGATE,
    ),
    Mutant(
        "the closed-form KL lacks its half",
        "rl/trust_region.py",
        "return 0.5 * sensitivity",
        "return sensitivity",
        ("flow/test_kernels.py::test_three_ways_to_the_same_kl",),
    ),
    Mutant(
        "the closed-form KL has the sensitivity instead of its square",
        "rl/trust_region.py",
        "sensitivity.to(v.device, torch.float32).square() *",
        "sensitivity.to(v.device, torch.float32) *",
        ("flow/test_kernels.py::test_three_ways_to_the_same_kl",),
    ),
    Mutant(
        "the paper's estimator has the wrong sign",
        "rl/trust_region.py",
        "return log_prob_old - log_prob",
        "return log_prob - log_prob_old",
        REGION,
    ),
    Mutant(
        "the position term compares with the rollout's policy",
        "rl/trust_region.py",
        "position = self.beta_position * closed_form_kl(v, v_anchor, sensitivity)",
        "position = self.beta_position * closed_form_kl(v, v_old, sensitivity)",
        REGION,
    ),
    Mutant(
        "the two weights of the dual trust region are swapped",
        "rl/trust_region.py",
        'weight = self.beta_velocity if self.mode == "dual" else 1.0',
        'weight = self.beta_position if self.mode == "dual" else 1.0',
        REGION,
    ),
    Mutant(
        "the ramp of lambda starts one update late",
        "rl/kl_control.py",
        "* self.updates / c.warmup_updates",
        "* (self.updates + 1) / c.warmup_updates",
        KL,
    ),
    Mutant(
        "ppo and the paper's feedback are swapped",
        "rl/kl_control.py",
        '(relax, tighten) if c.kind == "paper" else (tighten, relax)',
        '(relax, tighten) if c.kind == "ppo" else (tighten, relax)',
        KL,
    ),
    Mutant(
        "lambda is clamped at one end only",
        "rl/kl_control.py",
        "return min(max(self.value * factor, c.lambda_min), c.lambda_max)",
        "return max(self.value * factor, c.lambda_min)",
        KL,
    ),
    Mutant(
        "the feedback averages all KLs instead of the last few",
        "rl/kl_control.py",
        "[*self.history, float(kl)][-self.config.window :]",
        "[*self.history, float(kl)]",
        KL,
    ),
    Mutant(
        "a resumed controller forgets its history",
        "rl/kl_control.py",
        'self.history = [float(kl) for kl in state["history"]]',
        "self.history = []",
        KL,
    ),
)
