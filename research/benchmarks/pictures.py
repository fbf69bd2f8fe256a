"""Figures of research/results and README.md from committed rows. Each has the digest of its rows in it, so that one that is stale is found (`pages.py --check`)."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from views import summary_of

from sage_grpo.tools.compare.report import COLOURS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "research" / "results"
STAMP = "rows"
"""Field of a PNG with the digest."""
EVIDENCE = ROOT / "docs" / "images" / "evidence.png"
WORLDS = ROOT / "docs" / "images" / "worlds.png"
IN_WORLDS = {"headline": "shapes", "scenes_headline": "scenes"}
"""Of the figure over both worlds: suites, and what their worlds are called."""
OVER_SEVERAL = {
    EVIDENCE: [RESULTS / name for name in ("headline", "scenes_hacking", "heat")],
    WORLDS: [RESULTS / name for name in IN_WORLDS],
}
"""Figures over several comparisons, with their folders."""


def digest(folders: Sequence[Path]) -> str:
    """Of rows and of what was asked for."""
    content = b"".join((folder / name).read_bytes() for folder in folders for name in ("runs.jsonl", "suite.json"))
    return hashlib.sha256(content).hexdigest()[:16]


def draw_suite(folder: Path) -> None:
    """Draw the figures that a comparison in research/results has again, from the rows beside them."""
    from sage_grpo.tools.compare.report import draw

    summary_of.cache_clear()
    with tempfile.TemporaryDirectory() as place:
        drawn = [(path.name, path.read_bytes()) for path in draw(summary_of(folder), Path(place))]
    for name, content in drawn:
        if (folder / name).is_file():
            (folder / name).write_bytes(stamped(content, digest([folder])))


def draw_evidence() -> Path:
    """README's figure: methods at equal cost, a learned reward against the truth, a target KL at a high learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    methods, learned, heat = (summary_of(folder) for folder in OVER_SEVERAL[EVIDENCE])
    names = [name for name in methods.arms if name not in (methods.suite.baseline, "branch_long", "sage x 2")]
    for offset, (kind, label) in enumerate(
        (("equal_difference", "network evaluations"), ("clips_difference", "clips"))
    ):
        _differences(axes[0], methods, names, kind, 0.28 * offset - 0.14, f"equal {label}", COLOURS[offset])
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].set_xlim(right=0.28)  # room for the legend
    axes[0].set_xlabel("score minus that of branch (95% interval)")
    for place, (column, label) in enumerate((("total", "learned reward"), ("Overall", "truth"))):
        _curve(axes[1], learned.arms["branch, hot"].curves[column], label, COLOURS[place])
    for place, (arm, label) in enumerate(
        (("target_kl 2e-04", "4 x rate, target KL"), ("none 5e-05", "good rate"), ("none 2e-04", "4 x rate"))
    ):
        _curve(axes[2], heat.arms[arm].curves["Overall"], label, COLOURS[place])
    titles = ("Methods at equal cost", "A learned reward is fooled (3 x rate)", "Four times the learning rate")
    for axis, title, corner in zip(axes, titles, ("center right", "lower center", "center right")):
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, lw=0.6)
        axis.legend(frameon=False, fontsize=8, loc=corner)
    for axis in axes[1:]:
        axis.set_xlabel("iterations")
        axis.set_ylabel("score on held-out prompts")
    return _written(figure, EVIDENCE)


def draw_worlds() -> Path:
    """The figure of research/results/headline.md: every method minus branch, in both worlds, at equal clips and at equal passes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {title: summary_of(RESULTS / name) for name, title in IN_WORLDS.items()}
    names = [name for name in found["scenes"].arms if name != found["scenes"].suite.baseline]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
    for axis, (kind, title) in zip(
        axes, (("clips_difference", "At equal clips"), ("equal_difference", "At equal network evaluations"))
    ):
        for offset, color, (world, summary) in zip((-0.14, 0.14), COLOURS, found.items()):
            _differences(axis, summary, names, kind, offset, world, color)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("Overall minus branch's (95% interval)")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, lw=0.6)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].legend(frameon=False, fontsize=9, loc="lower left")
    return _written(figure, WORLDS)


def _written(figure: Any, file: Path) -> Path:
    """A figure over several comparisons, with the digest of their rows."""
    from matplotlib import pyplot

    stream = io.BytesIO()
    figure.savefig(stream, dpi=110)
    pyplot.close(figure)
    file.write_bytes(stamped(stream.getvalue(), digest(OVER_SEVERAL[file])))
    return file


def _differences(axis: Any, summary: Any, names: list[str], kind: str, offset: float, label: str, color: str) -> None:
    """Differences from the baseline with their intervals, a method in each row."""
    differences = [getattr(summary.arms[name], kind)[summary.suite.columns[0].key] for name in names]
    places = [place + offset for place in range(len(names))]
    means, halves = [one.mean for one in differences], [one.half for one in differences]
    axis.errorbar(means, places, xerr=halves, fmt="o", ms=4, capsize=3, lw=1.4, color=color, label=label)
    axis.axvline(0, color="#999999", lw=0.9, ls=":")


def _curve(axis: Any, curve: Any, label: str, color: str) -> None:
    """Means over seeds by iteration, and their intervals."""
    points = sorted(curve)
    mean, half = [curve[p].mean for p in points], [curve[p].half for p in points]
    axis.plot(points, mean, color=color, lw=1.6, label=label)
    low, high = [m - h for m, h in zip(mean, half)], [m + h for m, h in zip(mean, half)]
    axis.fill_between(points, low, high, color=color, alpha=0.15, lw=0)


def stamped(picture: bytes, mark: str) -> bytes:
    """A figure in 256 colors, a third of the bytes, with a digest in it."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    fields, stream = PngInfo(), io.BytesIO()
    fields.add_text(STAMP, mark)
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(
        stream, format="PNG", optimize=True, pnginfo=fields
    )
    return stream.getvalue()


def suites() -> list[Path]:
    """Every comparison in research/results."""
    return sorted(file.parent for file in RESULTS.glob("*/suite.json"))


def stale() -> Iterator[Path]:
    """Figures that are not of the rows that are there now."""
    from PIL import Image

    wanted = {file: digest([folder]) for folder in suites() for file in folder.glob("*.png")}
    wanted |= {file: digest(folders) for file, folders in OVER_SEVERAL.items()}
    for file, mark in wanted.items():
        if not file.is_file() or Image.open(file).text.get(STAMP) != mark:  # type: ignore[attr-defined]
            yield file


def redraw() -> None:
    """Draw what is stale."""
    old = set(stale())
    for folder in suites():
        if folder in {file.parent for file in old}:
            draw_suite(folder)
    for file, draw in ((EVIDENCE, draw_evidence), (WORLDS, draw_worlds)):
        if file in old:
            draw()
