"""Specs of the built-in rewards on tiny random networks, made once where they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_reward_checkpoints import (
    TEMPLATE,
    hpsv3_model,
    reference_model,
    write_clip,
    write_hpsv3,
    write_qwen_base,
    write_videoalign,
)

from sage_grpo.rewards.spec import RewardSpec

Make = Callable[[str], RewardSpec]


def of_clip(name: str, folder: Path, of: Make, **options: object) -> RewardSpec:
    return RewardSpec(name=name, options={"model": of("clip").options["model"], **options})


def aesthetic(folder: Path, of: Make) -> RewardSpec:
    torch.manual_seed(1)
    state = {"0.weight": torch.randn(8, 16), "1.weight": torch.randn(1, 8)}
    state |= {"0.bias": torch.zeros(8), "1.bias": torch.zeros(1)}
    save_file(state, folder / "head.safetensors")
    return of_clip("aesthetic", folder, of, head=str(folder / "head.safetensors"))


def videoalign(folder: Path, of: Make) -> RewardSpec:
    base = write_qwen_base(folder / "base")
    model, head, _ = reference_model(base, lora=True, output_dim=3)
    write_videoalign(folder / "reward", model, head, kind="adapter")
    (folder / "template.txt").write_text(TEMPLATE)
    names = {"checkpoint": "reward", "base": "base", "template": "template.txt"}
    options = {option: str(folder / name) for option, name in names.items()}
    return RewardSpec(name="videoalign", weights={"VQ": 0.5, "TA": 1.0}, options=options)


def hpsv3(folder: Path, of: Make) -> RewardSpec:
    base = write_qwen_base(folder / "base")
    write_hpsv3(folder, *hpsv3_model(base)[:2])
    names = {"checkpoint": "hpsv3.safetensors", "base": "base", "template": "template.py"}
    options = {option: str(folder / name) for option, name in names.items()}
    return RewardSpec(name="hpsv3", options={**options, "dtype": "float32"})


def clip(folder: Path, of: Make) -> RewardSpec:
    return RewardSpec(name="clip", options={"model": str(write_clip(folder))})


NETWORKS: dict[str, tuple[Callable[[Path, Make], RewardSpec], tuple[int, int]]] = {
    "clip": (clip, (30, 30)),
    "pickscore": (lambda folder, of: of_clip("pickscore", folder, of), (30, 30)),
    "aesthetic": (aesthetic, (30, 30)),
    "hpsv2": (lambda folder, of: of_clip("hpsv2", folder, of), (30, 30)),
    "videoalign": (videoalign, (308, 336)),
    "hpsv3": (hpsv3, (112, 112)),
}
"""How a spec with tiny weights is made, and a size of frames that is the network's own: nothing is resized, and so nothing rounded
(HPSv3's with the fixture `small`)."""


def maker(folder_of: Callable[[str], Path]) -> Make:
    made: dict[str, RewardSpec] = {}

    def of(name: str) -> RewardSpec:
        if name not in made:
            made[name] = NETWORKS[name][0](folder_of(name), of)
        return made[name]

    return of
