"""Write the world's prompts as files, one prompt a line: `python -m research.scenes.prompts`."""

from __future__ import annotations

from research.scenes.world import FOLDER, SCENES
from sage_grpo.utils.safe_io import replace_text


def main() -> None:
    """Write train.txt and heldout.txt beside this file."""
    for split in SCENES.prompts:
        replace_text(FOLDER / f"{split}.txt", "\n".join(SCENES.texts(split)) + "\n")


if __name__ == "__main__":
    main()
