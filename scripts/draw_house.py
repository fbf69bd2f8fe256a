"""Draw the house from its code: the floors of tests/test_house.py, and who imports whom.

    python scripts/draw_house.py            # writes docs/images/house.svg
    python scripts/draw_house.py --check    # fails where that picture is not the code's

A box is a room or a module of the package, a row a floor. A line goes down to what a box imports, but where a line through another box
says it already.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
PICTURE = ROOT / "docs" / "images" / "house.svg"
WIDTH, LETTER, HEIGHT, GAP, ROW = 1200, 7.4, 26, 14, 74
"""In pixels: the picture, a letter, a box, the space between boxes, and from floor to floor."""


def imports() -> dict[str, set[str]]:
    """Which units every unit of the house imports, by the test's own reading of the source."""
    import test_house as house

    graph: dict[str, set[str]] = {unit: set() for floor in house.FLOORS for unit in floor}
    for path in house.FILES:
        unit = house._unit(house._module_name(path))
        others = {house._unit(name) for name, _ in house._package_imports(path)}
        if unit in graph:  # one without a floor is the test's to report
            graph[unit] |= (others & graph.keys()) - {unit}
    return graph


def below(graph: dict[str, set[str]], unit: str) -> set[str]:
    """Everything that a unit imports, directly or through others."""
    found: set[str] = set()
    coming = list(graph[unit])
    while coming:
        other = coming.pop()
        if other not in found:
            found.add(other)
            coming += graph[other]
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same imports without those that follow from others."""
    reach = {unit: below(graph, unit) for unit in graph}
    return {unit: {one for one in own if not any(one in reach[other] for other in own)} for unit, own in graph.items()}


def places(floors: tuple[tuple[str, ...], ...]) -> dict[str, tuple[float, float, float]]:
    """Left edge, top edge and width of every box; the ground floor is at the bottom."""
    found: dict[str, tuple[float, float, float]] = {}
    for floor, units in enumerate(reversed(floors)):
        widths = [LETTER * len(unit) + 16 for unit in units]
        x = (WIDTH - sum(widths) - GAP * (len(units) - 1)) / 2
        for unit, width in zip(units, widths):
            found[unit] = x, 20 + ROW * floor, width
            x += width + GAP
    return found


def drawn() -> str:
    """The picture."""
    import test_house as house

    boxes, height = places(house.FLOORS), 40 + ROW * len(house.FLOORS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" font-size="12">',
        "<title>The rooms of sage_grpo by floor: imports point down</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<g fill="none" stroke="#7a8aa0" stroke-opacity="0.45">',
    ]
    for unit, own in sorted(reduced(imports()).items()):
        x, y, width = boxes[unit]
        for other in sorted(own):
            to_x, to_y, to_width = boxes[other]
            start, end, top = x + width / 2, to_x + to_width / 2, y + HEIGHT
            lines.append(
                f'<path d="M{start:.0f} {top} C{start:.0f} {top + 30} {end:.0f} {to_y - 30} {end:.0f} {to_y}"/>'
            )
    lines.append("</g>")
    for unit, (x, y, width) in boxes.items():
        lines.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="4" fill="#eef2f8" stroke="#40566f"/>'
        )
        lines.append(f'<text x="{x + width / 2:.0f}" y="{y + 17}" text-anchor="middle" fill="#14202e">{unit}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main(arguments: list[str]) -> int:
    """Draw, or check what is drawn."""
    if arguments == ["--check"]:
        fresh = PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == drawn()
        print("fresh" if fresh else f"{PICTURE} is not the code's: run python scripts/draw_house.py")
        return 0 if fresh else 1
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    PICTURE.write_text(drawn(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
