"""Paths in a folder that somebody else made: they stay in it, and what is written there overwrites nothing elsewhere."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from sage_grpo.utils.safe_io import LeadsOut, inside, printable, replace_text, replacing, whole


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "file").write_text("own")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "file").write_text("secret")
    (tmp_path / "given-too").mkdir()
    return folder


def test_what_is_in_the_folder_is_there_also_by_links_of_its_own(root: Path) -> None:
    (root / "link").symlink_to("part/file")
    (root / "part" / "up").symlink_to("..")
    assert inside(root, "link").read_text() == "own"
    assert inside(root, "part", "up", "part", "file").read_text() == "own"
    assert inside(root, "not", "there") == root / "not" / "there"


def test_a_folder_that_the_user_names_may_be_a_link(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    named.symlink_to(root)
    assert inside(named, "part", "file") == named / "part" / "file"
    assert whole(named, "part") == named / "part"
    monkeypatch.chdir(tmp_path)
    assert inside(Path("named"), "part") == Path("named/part")


def test_every_way_out_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "file").symlink_to(tmp_path / "private" / "file")
    (root / "folder").symlink_to("../private")
    (root / "part" / "second").symlink_to("../folder")  # a link to a link
    (root / "dangling").symlink_to(tmp_path / "private" / "new")
    (root / "twin").symlink_to(tmp_path / "given-too")  # whose name begins like the folder's
    ways = [("file",), ("folder", "file"), ("part", "second", "file"), ("dangling",), ("twin",)]
    ways += [("..", "private"), ("part", "..", "..", "private"), (str(tmp_path / "private"),)]
    for names in ways:
        with pytest.raises(LeadsOut, match="leads out of"):
            inside(root, *names)


def test_a_whole_folder_has_no_way_out_however_deep(root: Path, tmp_path: Path) -> None:
    (root / "part" / "a" / "b").mkdir(parents=True)
    (root / "part" / "a" / "b" / "own").symlink_to("../../file")
    assert whole(root, "part") == root / "part"
    (root / "part" / "a" / "b" / "out").symlink_to(tmp_path / "private" / "file")
    with pytest.raises(LeadsOut, match="private"):
        whole(root, "part")
    assert inside(root, "part")  # itself it does not lead out
    (root / "part" / "a" / "b" / "out").unlink()
    (root / "part" / "a" / "side").symlink_to(root)  # what lies there is not looked through
    with pytest.raises(LeadsOut):
        whole(root, "part")


@pytest.mark.parametrize("planted", ["link", "hard link", "file"])
def test_writing_goes_through_nothing_that_lies_there(root: Path, tmp_path: Path, planted: str) -> None:
    private = tmp_path / "private" / "file"
    for name in (".page.html.tmp", "page.html"):
        if planted == "link":
            (root / name).symlink_to(private)
        elif planted == "hard link":
            (root / name).hardlink_to(private)
        else:
            (root / name).write_text("left behind, and longer than what is written now")
    replace_text(root / "page.html", "new")
    assert private.read_text() == "secret"
    assert (root / "page.html").read_text() == "new"
    assert not (root / "page.html").is_symlink()
    assert sorted(file.name for file in root.iterdir()) == ["page.html", "part"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(root: Path) -> None:
    replace_text(root / "new" / "page.html", "old")
    with pytest.raises(FileNotFoundError), replacing(root / "new" / "page.html") as fresh:
        (fresh.parent / fresh.read_text() / "nowhere" / "half").read_text()
    assert [(file.name, file.read_text()) for file in (root / "new").iterdir()] == [("page.html", "old")]
    plain = root / "plain"
    plain.write_text("")  # others may read what others may read usually
    assert stat.S_IMODE((root / "new" / "page.html").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_terminal_shows_what_it_would_obey() -> None:
    text = "\x1b]0;title\x07 \x1b[2J \x9b31m back\x08 over\r \x7f \u202eturned \ud800"
    shown = printable(text)
    assert all(letter.isprintable() for letter in shown)
    assert "\\x1b]0;title\\x07" in shown
    usual = "two\nlines\tand 红色的圆 مثلث é 🎈"
    assert printable(usual) == usual
