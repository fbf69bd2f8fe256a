"""`sage-grpo inspect`: tables and a figure of chosen kernels, and the grid of a checkpoint's own scheduler."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

import tiny
from sage_grpo import cli
from sage_grpo.commands.inspect import Options, _noise_to_data, run
from sage_grpo.flow.kernels import KERNELS
from sage_grpo.flow.windows import Window
from sage_grpo.models.schedulers import own_sigmas

GOLDEN = Path(__file__).with_name("inspect.txt")
"""The text of the tables and of everything in the figure, for four steps; written anew by `python tests/commands/test_inspect.py`."""
NUMBER = re.compile(r"(?<![\w#])-?\d+(?:\.\d+)?(?:e[-+]\d+)?(?!\w)")
SHOWN = {"kernels": [*KERNELS], "steps": 4, "shift": 8.0, "window": Window(kind="fixed", start=0, length=3)}
PROPERTIES = ("xlim", "ylim", "xscale", "yscale", "xlabel", "ylabel")


def values(numbers: Any) -> str:
    """Numbers in four digits; of many the first, the last, their mean and their count."""
    found = [float(one) for one in numbers]
    if len(found) > 8:
        found = [found[0], found[-1], sum(found) / len(found), len(found)]
    return " ".join(f"{round(one, 9):.4g}" for one in found)


def artists(axis: Any) -> Iterator[str]:
    """Everything in a panel as text."""
    from matplotlib.colors import to_hex

    yield f"title: {axis.get_title(loc='left')}"
    for name in PROPERTIES:
        value = getattr(axis, f"get_{name}")()
        yield f"{name}: {value if isinstance(value, str) else values(value)}"
    yield f"ticks: {[one.get_text() for one in axis.get_xticklabels()]} {len(axis.get_xticks(minor=True))}"
    yield f"spines: {[name for name, spine in axis.spines.items() if spine.get_visible()]}"
    yield f"grid: {[line.get_visible() for line in (*axis.get_xgridlines()[:1], *axis.get_ygridlines()[:1])]}"
    for line in axis.lines:
        look = f"{to_hex(line.get_color())} {line.get_marker()} {line._dash_pattern} {values([line.get_lw(), line.get_ms()])}"
        yield f"line {look} {line.get_alpha()} {line.zorder}: {values(line.get_xdata())} | {values(line.get_ydata())}"
    for patch in axis.patches:
        yield f"bar {to_hex(patch.get_facecolor())}: {values([*patch.get_xy(), patch.get_width(), patch.get_height()])}"
    for one in axis.collections:
        area = [sum(map(abs, path.vertices[:, 1])) for path in one.get_paths()]
        look = values([one.get_alpha(), one.zorder, *one.get_linewidth()])
        yield f"area {[*map(to_hex, one.get_facecolor())]} {look}: {values(area)}"
    for text in axis.texts:
        place = values(text.get_position())
        yield f"text {text.get_text()!r} {place} {text.get_color()} {text.get_fontsize()} {text.get_va()}"
    yield from legend(axis.get_legend())


def legend(one: Any) -> Iterator[str]:
    """The entries of a legend and its place."""
    from matplotlib.colors import to_hex

    if one is not None:
        handles = [
            (to_hex(handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor()), handle.get_alpha())
            for handle in one.legend_handles
        ]
        yield f"legend {one._loc} {one._ncols} {one.get_frame_on()}: {[text.get_text() for text in one.texts]} {handles}"


def described(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path, **options: Any) -> str:
    """What the command prints, and what is in the figure that it draws."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert run(Options(**SHOWN, **options, figure=out)) == 0
    monkeypatch.undo()
    (figure,) = figures
    head = figure._suptitle
    lines = [capsys.readouterr().out.replace(str(out), "FIGURE"), f"size: {values(figure.get_size_inches())}"]
    place = values([*head.get_position(), head.get_fontsize()])
    lines.append(f"head: {head.get_text()} {place} {head.get_ha()} {head.get_weight()}")
    lines += [
        *legend(figure.legends[0]),
        values(figure.legends[0].get_bbox_to_anchor().bounds[:2]),
        str(figure.legends[0]._fontsize),
    ]
    for axis in figure.axes:
        lines += ["", *artists(axis)]
    pyplot.close(figure)
    return "\n".join(line.rstrip() for text in lines for line in text.splitlines()) + "\n"


def test_tables_and_figure_show_what_they_showed(monkeypatch, capsys, tmp_path: Path) -> None:
    """Numbers to a thousandth: a library may add them up in another order."""
    told, golden = described(monkeypatch, capsys, tmp_path / "f.png"), GOLDEN.read_text(encoding="utf-8")
    assert NUMBER.sub("_", told) == NUMBER.sub("_", golden)
    found, wanted = ([float(one) for one in NUMBER.findall(text)] for text in (told, golden))
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert (tmp_path / "f.png").read_bytes()[:20] == b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x08\x61"  # 2145 pixels wide


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("wan21_t2v", tmp_path_factory.mktemp("inspect") / "wan", shift=3.0)


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["inspect", "--json", "--figure", "null", *words]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_grid_is_the_checkpoints_own(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(checkpoint / "scheduler")
    words = ["--model", str(checkpoint), "--steps", "20", "--kernels", '["sage", "sage_exact"]']
    for more, shift in (([], 3.0), (["--shift", "7"], 7.0)):
        document = inspected(capsys, *words, *more)
        own = own_sigmas(scheduler, 20, shift, even=False)
        assert [row["sigma"] for row in document["kernels"]["sage"]["rows"]] == pytest.approx(own[:-1].tolist())
        assert (document["steps"], document["shift"], document["eta"]) == (20, shift, 0.5)
        told = ["Step 18 is deterministic, too" in " ".join(one["warnings"]) for one in document["kernels"].values()]
        assert told == [True, False]


def test_without_a_model_the_grid_is_even_and_a_kernel_has_its_own_clamp(capsys) -> None:
    document = inspected(capsys, "--steps", "29", "--kernels", "ode,sage,cps", "--sigma_max", "0.9")
    assert (document["model"], document["shift"], list(document["kernels"])) == (None, 5.0, ["ode", "sage", "cps"])
    sage = document["kernels"]["sage"]
    assert [row["step"] for row in sage["rows"] if row["std"] == 0] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 28]
    assert any("swallows" in text for text in sage["warnings"])
    assert document["kernels"]["ode"]["sensitivity_span"] is None


def test_an_axis_of_many_steps_names_every_few_of_them() -> None:
    seen: dict[str, Any] = {}
    axis = SimpleNamespace(
        **{f"set_{name}": lambda *words, name=name: seen.update({name: words}) for name in ("xticks", "xlim", "xlabel")}
    )
    report: Any = SimpleNamespace(rows=[SimpleNamespace(step=step, sigma=1 - step / 32) for step in range(18)])
    _noise_to_data(axis, report)
    assert seen["xticks"] == ([0, 3, 6, 9, 12, 15], ["1", "0.906", "0.812", "0.719", "0.625", "0.531"])
    assert seen["xlim"] == (-0.5, 17.5)


def test_a_kernel_that_does_not_take_the_eta_is_left_out_by_name() -> None:
    with pytest.raises(ValueError, match=r'leave cps out with --kernels \["sage"\]'):
        run(Options(kernels=["sage", "cps"], eta=1.5, figure=None))
    with pytest.raises(ValueError, match="kernels is empty"):
        run(Options(kernels=[], figure=None))
