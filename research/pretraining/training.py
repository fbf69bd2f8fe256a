"""What both stages of pretraining share: averaged weights and captured steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def learning_rate(peak: float, progress: float, warm_up: float = 0.04) -> float:
    """Linear warm-up, then a cosine down to 1% of the peak, as a function of progress in [0, 1]."""
    if progress < warm_up:
        return peak * (progress + 1e-3) / (warm_up + 1e-3)
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))
    return peak * (0.01 + 0.99 * fall)


class Step:
    """Forward and backward of one batch; on CUDA a captured graph for every shape of batch.

    Small networks are bound by the launching of kernels, which a graph does away with. Where capturing fails,
    the same function runs eagerly.
    """

    def __init__(self, loss: Callable[[Inputs], Inputs], parameters: list[Tensor], graphs: bool) -> None:
        self._loss = loss
        self._graphs = graphs and parameters[0].is_cuda
        self._captured: dict[Shapes, tuple[torch.cuda.CUDAGraph, Inputs, Inputs]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        # Graphs write to these very tensors: they are made once and never replaced.
        self._grads = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, self._grads):
            parameter.grad = gradient

    def __call__(self, inputs: Inputs) -> Inputs:
        """Leave gradients in the parameters and return the detached outputs, "loss" among them."""
        if not self._graphs:
            return self._eager(inputs)
        key = tuple((name, tuple(tensor.shape)) for name, tensor in inputs.items())
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(inputs)
            except RuntimeError as error:
                print(f"CUDA graphs are off, the step runs eagerly: {error}", flush=True)
                self._graphs = False
                torch.cuda.synchronize()
                return self._eager(inputs)
        graph, static, outputs = self._captured[key]
        for name, tensor in inputs.items():
            static[name].copy_(tensor)
        graph.replay()
        return outputs

    def _eager(self, inputs: Inputs) -> Inputs:
        torch._foreach_zero_(self._grads)
        outputs = self._loss(inputs)
        outputs["loss"].backward()
        return {name: value.detach() for name, value in outputs.items()}

    def _capture(self, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Inputs, Inputs]:
        static = {name: tensor.clone() for name, tensor in inputs.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._eager(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._eager(static)
        return graph, static, outputs


class TrainerOptions(Protocol):
    """What a trainer asks of the options of its command."""

    @property
    def graphs(self) -> bool:
        """Capture steps as CUDA graphs."""

    @property
    def report_seconds(self) -> float:
        """Seconds between two printed lines."""


class Trainer:
    """AdamW with clipping and averaged weights over named parameters, within a budget."""

    def __init__(
        self,
        name: str,
        options: TrainerOptions,
        *,
        parameters: Mapping[str, nn.Parameter],
        loss: Callable[[Inputs], Inputs],
        batches: Callable[[float], Inputs],
        minutes: float,
        steps: int,
        peak_lr: float,
        weight_decay: float,
        average: float,
        compiled: bool = False,
    ) -> None:
        """`minutes` of training, or `steps` where they are not 0. `batches` gets the progress in [0, 1]; `compiled` compiles the loss on a GPU."""
        self.name, self.parameters = name, dict(parameters)
        self._options, self._minutes, self._most_steps = options, minutes, steps
        self.averaged = {key: parameter.detach().clone() for key, parameter in self.parameters.items()}
        self._weights: list[Tensor] = list(self.parameters.values())
        self._batches, self._average, self._peak_lr = batches, average, peak_lr
        if compiled and self._weights[0].is_cuda:
            loss = torch.compile(loss, dynamic=False)
        self._step = Step(loss, self._weights, options.graphs)
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=peak_lr, betas=(0.9, 0.99), weight_decay=weight_decay, fused=self._weights[0].is_cuda
        )
        self.steps, self._spent = 0, 0.0

    @property
    def progress(self) -> float:
        """Share of the budget that is used up."""
        if self._most_steps:
            return self.steps / self._most_steps
        return self._spent / max(1e-9, 60 * self._minutes)

    def run(self, report: Callable[[], None] = lambda: None) -> None:
        """Train until the budget is used up, then leave the averaged weights in the network; `report` is called at every report."""
        last, reported, reported_steps = time.perf_counter(), time.perf_counter(), self.steps
        while self.progress < 1:
            outputs = self._advance()
            if self.steps % 10 == 0:
                outputs["loss"].item()  # keeps the host near the device, so that the clock means something
            now = time.perf_counter()
            self._spent, last = self._spent + now - last, now
            if now - reported >= self._options.report_seconds or self.progress >= 1:
                loss = outputs["loss"].item()
                if not math.isfinite(loss):
                    raise FloatingPointError(f"The loss of stage {self.name} is not finite; lower its learning rate.")
                rate = (self.steps - reported_steps) / (now - reported)
                extras = " ".join(f"{key} {value.item():.4f}" for key, value in outputs.items())
                print(f"[{self.name}] step {self.steps} {self.progress:4.0%} {extras} {rate:.1f} it/s", flush=True)
                report()
                reported, reported_steps = time.perf_counter(), self.steps
        with torch.no_grad():
            torch._foreach_copy_(self._weights, list(self.averaged.values()))

    def _advance(self) -> Inputs:
        rate = learning_rate(self._peak_lr, self.progress)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        outputs = self._step(self._batches(self.progress))
        nn.utils.clip_grad_norm_(self._weights, 1.0, foreach=True)
        self._optimizer.step()
        self.steps += 1
        decay = min(self._average, (self.steps + 1) / (self.steps + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averaged.values()), self._weights, 1 - decay)
        return outputs
