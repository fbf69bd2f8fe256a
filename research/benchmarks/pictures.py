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
AT_EQUAL = {
    "clips": {"shapes": "headline", "scenes": "scenes_headline"},
    "network evaluations": {"shapes": "budget", "scenes": "scenes_budget"},
}
"""Suites of both worlds by what their arms have in common."""
OVER_SEVERAL = {
    EVIDENCE: [RESULTS / name for name in ("budget", "scenes_budget", "scenes_hacking", "heat")],
    WORLDS: [RESULTS / name for suites in AT_EQUAL.values() for name in suites.values()],
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
    """README's figure: methods at equal network evaluations, a learned reward against the truth, a target KL at a high learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    first, second, learned, heat = (summary_of(folder) for folder in OVER_SEVERAL[EVIDENCE])
    names = [name for name in _methods() if name != "sage x 2"]
    for place, (methods, label) in enumerate(((first, "first world"), (second, "second world"))):
        _differences(axes[0], methods, names, "difference", 0.28 * place - 0.14, label, COLOURS[place])
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("score minus that of branch (95% interval)")
    for place, (column, label) in enumerate((("total", "learned reward"), ("Overall", "truth"))):
        _curve(axes[1], learned.arms["branch, hot"].curves[column], label, COLOURS[place])
    for place, (arm, label) in enumerate(
        (("target_kl 2e-04", "4 x rate, target KL"), ("none 5e-05", "good rate"), ("none 2e-04", "4 x rate"))
    ):
        _curve(axes[2], heat.arms[arm].curves["Overall"], label, COLOURS[place])
    titles = (
        "Methods at equal network evaluations",
        "A learned reward is fooled (3 x rate)",
        "Four times the learning rate",
    )
    for axis, title, corner in zip(axes, titles, ("lower left", "lower center", "center right")):
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

    names = _methods()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
    for axis, (what, kind) in zip(axes, (("clips", "clips_difference"), ("network evaluations", "difference"))):
        for offset, color, (world, name) in zip((-0.14, 0.14), COLOURS, AT_EQUAL[what].items()):
            _differences(axis, summary_of(RESULTS / name), names, kind, offset, world, color)
        axis.set_title(f"At equal {what}", loc="left", fontsize=10)
        axis.set_xlabel("Overall minus branch's (95% interval)")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, lw=0.6)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].legend(frameon=False, fontsize=9, loc="lower left")
    return _written(figure, WORLDS)


def _methods() -> list[str]:
    """The released methods that all suites have, without the baseline."""
    summary = summary_of(RESULTS / "scenes_headline")
    return [name for name in summary.arms if name != summary.suite.baseline]


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
