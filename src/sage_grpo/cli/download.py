"""Download and check all files that a recipe needs: `sage-grpo download RECIPE` (or FILE.yaml). Lists sizes first.

Takes every option of `train`. Hub files go to the hub's cache; files of a reward go to the folder that its option names. Files from
other sites are listed with their source, and the exit status is 1 while one is missing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.training.config import TrainConfig

if TYPE_CHECKING:
    from sage_grpo.rewards.spec import Need
    from sage_grpo.utils.hub import Listing


@dataclass(frozen=True, kw_only=True)
class Options(TrainConfig):
    """A training configuration whose files are fetched."""

    dry_run: bool = False
    """Only list the files that would be fetched."""


def run(options: Options) -> int:
    from sage_grpo.run.preflight import needs
    from sage_grpo.utils.hub import in_words, listing

    every = list(needs(options))
    wanted: list[tuple[Need, Listing, dict[str, Any]]] = []
    for need in every:
        repo, how = _origin(need, options)
        if repo:
            kind = _is_component if need.key == "model.path" else _is_needed if need.is_hub_id else _is_data
            files = listing(repo, how.get("revision"), kind)
            wanted.append((need, files, how))
            place = f"folder {how['folder']}" if "folder" in how else "the hub's cache"
            print(f"{need.key}: {files.repo}, commit {files.commit}, into {place}\n{files.table}")
    absent = [need for need in every if not need.is_here and need not in [one for one, _, _ in wanted]]
    total = sum(files.size for _, files, _ in wanted)
    if wanted:
        print(f"{in_words(total)} in all, less the files that are here already.")
    if not options.dry_run:
        _fetch_all(wanted)
    for need in absent:
        print(f"missing, and not on the hub: {need.key} {need.value}\n    {need.source}")
    if not every:
        print("This recipe needs no files besides the package.")
    return 1 if absent else 0


def _origin(need: Need, options: Options) -> tuple[str, dict[str, Any]]:
    """The repository that a need is fetched from ("" for none), with revision and folder."""
    from sage_grpo.utils.hub import hub_name

    if need.repo and not Path(need.value).expanduser().exists():
        return need.repo, {"folder": Path(need.value).expanduser()}
    name = hub_name(need.value) if need.is_hub_id else None
    if name is None:
        return "", {}
    revision = options.model.revision if need.key == "model.path" else name[1]
    return name[0], {} if revision is None else {"revision": revision}


def _is_needed(name: str) -> bool:
    return name.endswith((".safetensors", ".json", ".txt", ".model", ".jinja")) or name.startswith(
        ("LICENSE", "NOTICE")
    )


def _is_component(name: str) -> bool:
    """True for files of a diffusers checkpoint. Weights beside its folders are copies for other programs (LTX-2's repository has eight)."""
    return _is_needed(name) and ("/" in name or not name.endswith(".safetensors"))


def _is_data(name: str) -> bool:
    """True for files of a reward's release: weights in the authors' format, which are read without running code, and no programs."""
    return not name.endswith((".py", ".sh", ".ipynb", ".gitattributes"))


def _fetch_all(wanted: list[tuple[Need, Listing, dict[str, Any]]]) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    from sage_grpo.utils.hub import HubError, fetch, in_words

    for need, files, how in wanted:
        place = Path(how.get("folder", HF_HUB_CACHE)).absolute()
        disk = next(folder for folder in (place, *place.parents) if folder.exists())
        free = shutil.disk_usage(disk).free
        if not need.is_here and free < files.size:
            raise HubError(
                f"{files.repo} has {in_words(files.size)}, and {disk} has {in_words(free)} free. Make room, or set HF_HOME."
            )
        where = fetch(files, **how)
        print(f"{need.key}: here, every file in full: {where}")
