"""The hub, played by a fake: what is fetched is listed and checked."""

from __future__ import annotations

import importlib
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from sage_grpo.cli.main import main
from sage_grpo.utils import hub

COMMIT = "0123456789abcdef" * 2 + "01234567"
WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


class FakeHub:
    """Repositories as dictionaries of names and content; keeps what is asked of it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.fetched: list[tuple[str, str | None]] = []

    def model_info(self, repo: str, revision: str | None = None, files_metadata: bool = False) -> SimpleNamespace:
        sizes = {name: len(text) for name, text in self.repositories.get(repo, {}).items()}
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
        return SimpleNamespace(sha=COMMIT, siblings=files)

    def snapshot_download(
        self, repo: str, revision: Any = None, allow_patterns: Any = (), local_dir: Any = None
    ) -> str:
        self.fetched.append((repo, revision))
        place = Path(local_dir or self.place / repo.replace("/", "--"))
        for name, text in self.repositories[repo].items():
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_bytes(text)
        return str(place)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path / "cache")

    class Api:
        """A class, because libraries use its name in annotations."""

        def __new__(cls) -> Any:
            return made

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *words, **more: None)
    monkeypatch.chdir(tmp_path)
    made.repositories = {
        WAN: {"model_index.json": b"{}", "transformer/a.safetensors": b"x" * 2000, "transformer/a.bin": b"y" * 9000},
        "Qwen/Qwen2-VL-2B-Instruct": {"config.json": b"{}", "model.safetensors": b"z" * 3000},
        "KwaiVGI/VideoReward": {
            "model_config.json": b"{}",
            "checkpoint-1/model.pth": b"w" * 500,
            "train.py": b"import os",
        },
    }
    return made


def test_download_lists_sizes_fetches_and_checks(fake: FakeHub, tmp_path: Path, capsys) -> None:
    assert main(["download", "wan/sage", "--dry_run"]) == 1  # prompts and the template are missing
    said = capsys.readouterr().out
    assert not fake.place.exists()
    assert f"model.path: {WAN}, commit {COMMIT}" in said
    assert "2 kB  transformer/a.safetensors" in said
    assert "a.bin" not in said  # pickled weights stay there
    assert "train.py" not in said
    assert "6 kB in all" in said
    assert "data.prompts prompts.txt" in said
    assert "VideoAlign" in said.partition("template")[2]  # where the template comes from
    for name in ("prompts.txt", "ckpts/prompt_template.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a cat\n")
    assert main(["download", "wan/sage", "--model.revision", "v2"]) == 0
    assert (WAN, "v2") in fake.fetched
    assert capsys.readouterr().out.count("here, every file in full") == 3
    assert (tmp_path / "ckpts/VideoReward/checkpoint-1/model.pth").stat().st_size == 500
    assert [file.name for file in (fake.place / WAN.replace("/", "--") / "transformer").iterdir()] == ["a.safetensors"]


def test_download_leaves_the_single_files_of_a_diffusers_repository(fake: FakeHub, capsys) -> None:
    """LTX-2's has several of 20 to 40 GB for other programs; a reward's model may be such a file."""
    fake.repositories["Lightricks/LTX-2"] = fake.repositories[WAN] | {"ltx-2-19b-dev.safetensors": b"v" * 9000}
    fake.repositories["laion/clap-htsat-unfused"] = {"config.json": b"{}", "model.safetensors": b"u" * 100}
    main(["download", "ltx2/sage", "--dry_run"])
    said = capsys.readouterr().out
    assert "transformer/a.safetensors" in said
    assert "ltx-2-19b-dev" not in said
    assert said.count("  model.safetensors") == 2


def test_the_revision_is_the_one_asked_for(fake: FakeHub) -> None:
    found = hub.listing(WAN)
    hub.fetch(found, revision="v2")
    hub.fetch(found)
    assert fake.fetched == [(WAN, "v2"), (WAN, None)]


def _no_connection() -> Exception:
    """As the hub's client raises it, whichever that is in this version."""
    client = huggingface_hub.errors.HfHubHTTPError.__bases__[0]
    library = importlib.import_module(client.__module__.partition(".")[0])
    kind = library.ConnectError if hasattr(library, "ConnectError") else library.ConnectionError
    return kind("[Errno -2] Name or service not known")


def test_without_a_network_it_says_so_in_a_paragraph(fake: FakeHub, monkeypatch, capsys) -> None:
    def fail(*words: Any, **more: Any) -> Any:
        raise _no_connection()

    monkeypatch.setattr(fake, "model_info", fail)
    assert main(["download", "wan/sage", "--dry_run"]) == 2
    said = capsys.readouterr().err.strip()
    assert "Name or service not known). Check the name, the network" in said


def test_a_folder_of_the_hub_needs_its_commit(fake: FakeHub) -> None:
    fake.repositories["me/lora"] = {"pytorch_lora_weights.safetensors": b"abc", "evil.py": b"", "old.bin": b""}
    with pytest.raises(hub.HubError, match=rf"model\.lora\.path .*The present one is me/lora@{COMMIT}"):
        hub.pinned_folder("me/lora@main", option="model.lora.path")
    place = hub.pinned_folder(f"me/lora@{COMMIT}", option="model.lora.path")
    assert [path.name for path in place.iterdir()] == ["pytorch_lora_weights.safetensors"]
    assert fake.fetched == [("me/lora", COMMIT)]  # that commit, not the present one
    assert hub.pinned_folder("runs/lora", option="x") == Path("runs/lora")  # a folder, as it always was
    fake.repositories["me/pickled"] = {"model.pth": b"abc", "config.json": b"{}"}
    with pytest.raises(hub.HubError, match=r"holds no \.safetensors file"):
        hub.pinned_folder(f"me/pickled@{COMMIT}", option="videoalign checkpoint")


def test_exactly_what_was_listed_is_fetched(fake: FakeHub) -> None:
    """Names go to the hub as patterns."""
    fake.repositories["me/mine"] = dict.fromkeys(["a [1].mp4", "a 1.mp4", "b.json"], b"1")
    place = hub.fetch(hub.Listing("me/mine", COMMIT, {"a [1].mp4": 1}))
    assert [file.name for file in place.iterdir()] == ["a [1].mp4"]
