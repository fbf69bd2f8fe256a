"""A video model of two small matrices: the whole protocol, a millisecond a forward pass.

Laws of the trainer are tested on it by the hundred; that they also hold on real architectures is tested on the tiny
diffusers checkpoints, a few of each. A user writes a family of their own in the same way (`model.family: module.path`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sage_grpo.models.base import Abilities
from sage_grpo.models.spec import ModelSpec
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.types import Conditioning, VideoSpec

SHAPE = (3, 2, 4, 4)
SIZE = 96
WORDS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE + WORDS + 1, 64)
        self.second = nn.Linear(64, SIZE)
        for name, p in self.named_parameters():
            p.data = 0.15 * keyed_noise(tuple(p.shape), "toy", name)

    def forward(self, x: Tensor, sigma: Tensor, words: Tensor) -> Tensor:
        level = sigma.to(x).expand(len(x), 1)
        return self.second(torch.tanh(self.first(torch.cat([x.flatten(1), words, level], 1)))).view_as(x)


class ToyModel:
    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.network, self.others = spec, Net(), ()
        self.video = VideoSpec(frames=2, height=8, width=8, fps=8.0)
        self.device = torch.device("cpu")
        self.shift = 5.0 if spec.shift is None else spec.shift
        self.guidance_scale = 1.0
        self._conditions: dict[str, Conditioning] = {}

    def encode(self, prompts: Sequence[str], images: Sequence[Tensor | None] | None = None) -> list[Conditioning]:
        for text in prompts:
            self._conditions.setdefault(text, Conditioning({"words": keyed_noise((WORDS,), "word", text)}, None))
        return [self._conditions[text] for text in prompts]

    def latent_shape(self) -> tuple[int, ...]:
        return SHAPE

    def sigmas(self, num_steps: int, shift: float | None = None) -> Tensor:
        return Schedule.shifted(num_steps, self.shift if shift is None else shift).sigmas

    def velocity(
        self, x: Tensor, sigma: Tensor, conditions: Sequence[Conditioning], *, guidance: float | None = None
    ) -> Tensor:
        return self.network(x, torch.as_tensor(sigma), torch.stack([c.tensors["words"] for c in conditions]))

    def trains(self, sigma: Tensor | float) -> bool:
        return True

    def decode(self, latents: Tensor, progress: object = None) -> Tensor:
        return self.pixels(latents).round().to(torch.uint8).contiguous()

    def pixels(self, latents: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        pixels = (torch.sigmoid(latents) * 255).permute(0, 2, 3, 4, 1)
        return pixels.repeat_interleave(2, 2).repeat_interleave(2, 3)

    @property
    def abilities(self) -> Abilities:
        return Abilities(pixels=self.pixels, encoder=self)

    def to_latents(self, clips: Tensor) -> Tensor:
        pixels = clips[:, :, ::2, ::2].permute(0, 4, 1, 2, 3).to(torch.float32)
        return torch.logit(pixels / 255, eps=1e-3)

    def key(self) -> str:
        return "toy"

    def blocks(self) -> list[nn.Module]:
        return [self.network.first, self.network.second]

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.network.named_parameters())

    def keep(self, levels: list[str]) -> None:
        pass

    def place(self, part: str, device: str | torch.device) -> None:
        pass

    def unload_text(self) -> None:
        pass

    def load_lora(self, folder: str | Path) -> None:
        raise NotImplementedError

    def save(self, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None, merged: bool = False) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = {name: p.detach().clone() for name, p in self.trainable().items()} | dict(weights or {})
        save_file(state, str(Path(folder) / "toy.safetensors"))


def load(spec: ModelSpec, device: str | torch.device | None = None) -> ToyModel:
    return ToyModel(spec)
