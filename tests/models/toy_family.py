"""A whole family: the data of a prompt are Gaussian around the prompt's length, so the velocity is a line in x."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sage_grpo.samplers.schedule import Schedule
from sage_grpo.types import Conditioning, VideoSpec


class Toy:
    def __init__(self, spec, device):
        self.spec, self.device = spec, torch.device(device or "cpu")
        self.video = VideoSpec(frames=spec.frames or 1, height=2, width=2, fps=spec.fps or 8.0)
        self.shift, self.guidance_scale, self.others = spec.shift or 1.0, 1.0, []
        self.network = nn.Linear(1, 1).to(self.device)
        saved, first = Path(spec.path or "") / "toy.safetensors", {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}
        self.network.load_state_dict(load_file(saved) if saved.is_file() else first)

    def encode(self, prompts, images=None):
        return [Conditioning({"length": torch.tensor([float(len(prompt))])}) for prompt in prompts]

    def latent_shape(self):
        return (3, self.video.frames, 2, 2)

    def velocity(self, x, sigma, conditions, *, guidance=None):
        lengths = torch.stack([condition.tensors["length"] for condition in conditions]).to(self.device)
        mean = self.network(lengths).view(-1, 1, 1, 1, 1)
        return (2 * sigma - 1) / ((1 - sigma) ** 2 + sigma**2) * (x - (1 - sigma) * mean) - mean

    def sigmas(self, num_steps, shift=None):
        return Schedule.shifted(num_steps, shift or self.shift).sigmas

    def trains(self, sigma):
        return True

    def decode(self, latents, progress=None):
        return latents.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1).cpu()

    def blocks(self):
        return [self.network]

    def trainable(self):
        return dict(self.network.named_parameters())

    def keep(self, levels): ...

    def place(self, part, device):
        self.network.to(device)

    def unload_text(self): ...

    def load_lora(self, folder):
        raise ValueError("A toy has no LoRA: all of its weights are trained.")

    def save(self, folder, *, weights=None, merged=False):
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file({**self.network.state_dict(), **(weights or {})}, Path(folder) / "toy.safetensors")


def load(spec, device=None):
    return Toy(spec, device)
