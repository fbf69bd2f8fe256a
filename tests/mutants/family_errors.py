"""Errors in the other families: grids, guidance styles, packing, decoding, what is trained."""

from __future__ import annotations

from mutants.mutant import Mutant

FAMILIES = "models/test_families.py::"
METHODS = "train/test_trainer_families.py::test_methods_of_every_kind_train_every_family"


def parity(kind: str, scale: float = 4.0) -> tuple[str, ...]:
    return (f"{FAMILIES}test_ode_rollout_is_the_pipeline[{kind}-{scale}]",)


MUTANTS = (
    Mutant(
        "a dynamic shift takes mu itself",
        "models/schedulers.py",
        'return math.exp(mu) if config["time_shift_type"] == "exponential" else mu',
        "return mu",
        parity("flux"),
    ),
    Mutant(
        "the scheduler is told the shift as mu",
        "models/schedulers.py",
        'math.log(shift) if scheduler.config.time_shift_type == "exponential" else shift',
        "shift",
        parity("ltx", 1.0),
    ),
    Mutant(
        "renormalised guidance takes the norm of single latents",
        "models/guidance.py",
        "guided * (token_norm(v, self.renormalize) / token_norm(guided, self.renormalize))",
        "guided * (token_norm(v, 1) / token_norm(guided, 1))",
        parity("qwen_image"),
    ),
    Mutant(
        "an embedded scale is not what was asked for",
        "models/family.py",
        "told_scale = torch.tensor(float(scale))",
        "told_scale = torch.tensor(self.traits.guidance_scale)",
        parity("flux"),
    ),
    Mutant(
        "an embedded scale runs a negative branch too",
        "models/family.py",
        "if guided and not self.guidance.embedded:",
        "if guided:",
        (f"{FAMILIES}test_an_embedded_scale_needs_no_negative_prompt_and_one_pass",),
    ),
    Mutant(
        "tokens of a square are packed rows for columns",
        "models/packing.py",
        "squares.permute(0, 2, 3, 5, 1, 4, 6)",
        "squares.permute(0, 2, 3, 5, 1, 6, 4)",
        parity("flux", 1.0),
    ),
    Mutant(
        "LTX-Video's frame rate is ignored",
        "models/ltx.py",
        "(self.grid.temporal or 1) / self.video.fps",
        "(self.grid.temporal or 1) / 25",
        parity("ltx", 1.0),
    ),
    Mutant(
        "LTX-Video's network sees padding",
        "models/ltx.py",
        "text[0][mask[0].bool()]",
        "text[0]",
        parity("ltx", 1.0),
    ),
    Mutant(
        "LTX-Video's decoder adds other noise each time",
        "models/ltx.py",
        "torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(0))",
        "torch.randn(z.shape[1:])",
        (f"{FAMILIES}test_ltx_options_reach_guidance_and_decoder",),
    ),
    Mutant(
        "HunyuanVideo is told its guidance without the factor",
        "models/hunyuan.py",
        "1000.0 * scale",
        "scale",
        parity("hunyuan"),
    ),
    Mutant(
        "SANA's instruction stands before negative prompts too",
        "models/sana_video.py",
        "complex_human_instruction=self._instruction if instructed else None",
        "complex_human_instruction=self._instruction",
        parity("sana_video"),
    ),
    Mutant(
        "SANA's instruction is left out",
        "models/family.py",
        "self._branch_inputs(self._instruct(prompt), image, key)",
        "self._branch_inputs(prompt, image, key)",
        parity("sana_video", 1.0),
    ),
    Mutant(
        "FLUX's latents are not moved before decoding",
        "models/flux.py",
        "return (latents / config.scaling_factor) + config.shift_factor",
        "return latents / config.scaling_factor",
        parity("flux", 1.0),
    ),
    Mutant(
        "SD3.5's last text queries are trained",
        "models/sd3.py",
        " | unread_queries(transformer)",
        "",
        (f"{FAMILIES}test_replay_gradients_and_what_blocks_keep[sd3]",),
    ),
    Mutant(
        "only the first list of blocks keeps what it is told",
        "models/family.py",
        "return [block for name in self.traits.blocks for block in getattr(transformer, name)]",
        "return list(getattr(transformer, next(iter(self.traits.blocks))))",
        (f"{FAMILIES}test_replay_gradients_and_what_blocks_keep[flux]",),
    ),
    Mutant(
        "dead parameters are looked for in the first list of blocks only",
        "models/gradients.py",
        "fewer = {blocks[name]: min(2, count) for name, count in layers.items()}",
        'fewer = {"num_layers": 1}',
        (f"{FAMILIES}test_replay_gradients_and_what_blocks_keep[qwen_image]",),
    ),
    Mutant(
        "a family replays another timestep than it sampled",
        "models/flux.py",
        "timestep=timestep / 1000",
        "timestep=timestep / (1000 if torch.is_grad_enabled() else 1001)",
        (f"{METHODS}[flux]",),
    ),
)
