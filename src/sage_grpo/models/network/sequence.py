"""What a network must know to run on a part of a clip's tokens: sequence parallelism, seen from a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class SequenceSplit(Protocol):
    """One rank's part of the tokens (implemented by `sage_grpo.parallel.context.SequenceParallel`)."""

    def check(self, heads: int) -> None:
        """Raise unless the heads can be dealt out."""
        ...

    def counts(self, total: int) -> list[int]:
        """Tokens of every rank."""
        ...

    def split(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of all."""
        ...

    def merge(self, tokens: Tensor, total: int) -> Tensor:
        """All tokens (batch x tokens x channels) from every rank's."""
        ...

    def attend(
        self,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        counts: list[int],
    ) -> Tensor:
        """Attention over all ranks' tokens for this rank's; batch x tokens x heads x channels."""
        ...


@runtime_checkable
class SplitsSequence(Protocol):
    """A model that can run on a part of a clip's tokens; others have no sequence parallelism."""

    def split_sequence(self, sequence: SequenceSplit) -> None:
        """From now on run only this rank's part of every clip's tokens."""
        ...


class SplitRotary(NamedTuple):
    """Rotary embedding of this rank's tokens, with the number of tokens (video and text) that every rank has.

    The counts travel with the embedding because attention needs them and must not remember them: a checkpointed block runs
    again in the backward pass, when the last text length may have been another.
    """

    cos: Tensor
    sin: Tensor
    counts: list[int]


def split_rotary(sequence: SequenceSplit, rotary: tuple[Tensor, Tensor], *, dim: int, extra: int = 0) -> SplitRotary:
    """This rank's part of a rotary embedding of video tokens (along `dim`), beside `extra` text tokens without position."""
    cos, sin = rotary
    counts = [video + text for video, text in zip(sequence.counts(cos.shape[dim]), sequence.counts(extra))]
    return SplitRotary(sequence.split(cos, dim), sequence.split(sin, dim), counts)
