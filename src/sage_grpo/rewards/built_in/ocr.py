"""Text in video: similarity of the text in the frames to the quoted text of the prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_grpo.rewards.frames import sample_indices
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.types import PartScores, RewardFacts

# an apostrophe inside a word is no quotation mark, so plain single quotes do not count
_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”|«([^»]+)»|「([^」]+)」')


def quoted_text(prompt: str) -> str:
    return " ".join("".join(groups).strip() for groups in _QUOTED.findall(prompt))


def normalise(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.casefold())


def edit_distance(first: str, second: str) -> int:
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def text_score(target: str, read: str) -> float:
    """1 - distance / longer length, in [0, 1]; 1 when the normalized texts are equal."""
    target, read = normalise(target), normalise(read)
    return 1.0 - edit_distance(target, read) / max(len(target), len(read), 1)


class OcrReward:
    """OCR with rapidocr-onnxruntime, which brings its own weights (pip install "sage-grpo[ocr]")."""

    facts = RewardFacts(
        what="how well frames show the text that the prompt quotes",
        parts="OCR",
        extra="ocr",
        module="rapidocr_onnxruntime",
        licence="rapidocr: Apache-2.0",
    )

    names = ("OCR",)

    def __init__(
        self,
        *,
        sample_fps: float = 1.0,
        num_frames: int = 4,
        engine: Callable[[Any], Any] | None = None,
    ) -> None:
        """engine: for tests, or another recognizer."""
        self._sample_fps, self._num_frames = sample_fps, num_frames
        if engine is None:
            try:
                from rapidocr_onnxruntime import RapidOCR
            except ModuleNotFoundError as error:
                raise RewardConfigError('The ocr reward needs pip install "sage-grpo[ocr]".') from error
        self._engine = engine or RapidOCR()

    def frames_read(self, count: int, fps: float) -> list[int]:
        return sample_indices(count, fps, sample_fps=self._sample_fps, max_frames=self._num_frames)

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score the clips; a prompt without quoted text cannot be scored."""
        indices = self.frames_read(videos.shape[1], fps)
        scores, reasons = torch.full((len(prompts),), torch.nan), {}
        for index, prompt in enumerate(prompts):
            target = normalise(quoted_text(prompt))
            if not target:
                reasons[index] = "the prompt has no text in double quotation marks"
                continue
            frames = videos[index, indices].flip(-1).cpu().numpy()  # the engine takes blue-green-red
            scores[index] = torch.tensor([text_score(target, self._read(frame)) for frame in frames]).mean()
        return PartScores({"OCR": scores}, reasons)

    def _read(self, frame: Any) -> str:
        result, _ = self._engine(frame)
        return " ".join(reading_order([(box, text) for box, text, _ in result or []]))


def reading_order(boxes: Sequence[tuple[Sequence[Sequence[float]], str]]) -> list[str]:
    """Texts by lines from the top, each from the left. A box is four corners (x, y), from the top left clockwise.

    A box continues the line whose last box it overlaps in height: they share at least half of the lower one's height. A whole line may therefore be
    tilted by more than its height, as long as neighbors are not.
    """
    lines: list[list[tuple[float, float, str]]] = []
    for corners, text in sorted(boxes, key=lambda box: min(x for x, _ in box[0])):
        top, bottom = (corners[0][1] + corners[1][1]) / 2, (corners[2][1] + corners[3][1]) / 2
        shares = [
            (min(bottom, last[1]) - max(top, last[0])) / max(min(bottom - top, last[1] - last[0]), 1e-6)
            for *_, last in lines
        ]
        place = max(range(len(lines)), key=lambda number: shares[number], default=-1)
        if place >= 0 and shares[place] >= 0.5:
            lines[place].append((top, bottom, text))
        else:
            lines.append([(top, bottom, text)])
    lines.sort(key=lambda line: sum(top + bottom for top, bottom, _ in line) / len(line))
    return [text for line in lines for _, _, text in line]
