"""Errors that only clips which are not square, and prompts over a network's length, show."""

from __future__ import annotations

from mutants.mutant import Mutant

FAMILIES = "models/test_families.py::test_ode_rollout_is_the_pipeline"
PARITY = "models/test_parity.py::test_ode_rollout_is_the_pipeline"
CUT = "models/test_families.py::test_a_prompt_over_the_length_is_cut_where_the_pipelines_call_cuts_it"

MUTANTS = (
    Mutant(
        "FLUX takes rows for columns",
        "models/flux.py",
        "_prepare_latent_image_ids(len(x), height, width,",
        "_prepare_latent_image_ids(len(x), width, height,",
        (f"{FAMILIES}[flux-1.0]",),
    ),
    Mutant(
        "Qwen-Image takes rows for columns",
        "models/qwen_image.py",
        "shape = (1, x.shape[3] // SIDE, x.shape[4] // SIDE)",
        "shape = (1, x.shape[4] // SIDE, x.shape[3] // SIDE)",
        (f"{FAMILIES}[qwen_image-1.0]",),
    ),
    Mutant(
        "LTX-Video takes rows for columns",
        "models/ltx.py",
        "frames, height, width = x.shape[2:]",
        "frames, width, height = x.shape[2:]",
        (f"{FAMILIES}[ltx-1.0]",),
    ),
    Mutant(
        "Wan's picture is cut to a clip that lies on its side",
        "models/wan.py",
        "height, width, device = self.video.height, self.video.width,",
        "height, width, device = self.video.width, self.video.height,",
        (f"{PARITY}[wan_i2v-1.0]",),
    ),
    Mutant(
        "HunyuanVideo-1.5's picture is cut to a clip that lies on its side, and then pressed into it",
        "models/hunyuan15.py",
        "height=height, width=width, resize_mode=",
        "height=width, width=height, resize_mode=",
        (f"{PARITY}[hunyuan15_i2v-1.0]",),
    ),
    Mutant(
        "Qwen-Image reads more of a prompt than its pipeline's call does",
        "models/qwen_image.py",
        ", max_sequence_length=TEXT_TOKENS)",
        ")",
        (f"{CUT}[qwen_image]",),
    ),
    Mutant(
        "Qwen-Image reads less of a prompt than its pipeline's call does",
        "models/qwen_image.py",
        "TEXT_TOKENS = 512",
        "TEXT_TOKENS = 256",
        (f"{CUT}[qwen_image]",),
    ),
    Mutant(
        "a grid that needs two steps is NaN for one",
        "models/schedulers.py",
        'if num_steps == 1 and scheduler.config.get("shift_terminal"):',
        "if False:",
        ("models/test_parity.py::test_a_grid_between_two_ends_needs_two_steps",),
    ),
)
