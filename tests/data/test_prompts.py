"""Prompt files and the stream over them."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_grpo.config.ranges import LONGEST_PROMPT
from sage_grpo.data.prompts import Prompt, PromptStream, load_prompts, look_ahead, prompts_of
from sage_grpo.models.spec import ModelSpec


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_each_kind_of_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    picture = write(tmp_path, "images/first.png", "")
    row = 'prompt,seed,image\n"a cat, sitting",0,images/first.png\n"two\nlines",,\n'
    for name, text, prompts in (
        ("p.txt", "\ufeffa cat\n\n  # a comment\n  a dog  \n", [Prompt("a cat"), Prompt("a dog")]),
        ("p.csv", row, [Prompt("a cat, sitting", 0, picture), Prompt("two\nlines")]),
        ("p.jsonl", '{"prompt": "ü", "seed": 0}\n\n"a dog"\n', [Prompt("ü", 0), Prompt("a dog")]),
        (
            "p.json",
            '[{"prompt": "a cat", "seed": 3}, {"prompt": "x", "seed": null}]',
            [Prompt("a cat", 3), Prompt("x")],
        ),
    ):
        with pytest.warns(match="begin with # are comments and skipped, 1 of") if name == "p.txt" else nullcontext():
            assert load_prompts(write(tmp_path, name, text)) == prompts


@pytest.mark.parametrize("name", ["p.txt", "p.json", "rows", "negative"])
def test_a_prompt_that_no_model_reads_to_its_end_is_refused(name: str, tmp_path: Path) -> None:
    """Tokenizers go through all of it before they cut it off, for minutes where it has megabytes."""

    def read(text: str) -> object:
        if name in ("rows", "negative"):
            return prompts_of([text]) if name == "rows" else ModelSpec(negative_prompt=text)
        return load_prompts(write(tmp_path, name, text if name == "p.txt" else json.dumps([text])))

    assert read("a" * LONGEST_PROMPT)
    with pytest.raises(ValueError, match=r"aaa.* has 20,001 characters, more than 20,000: shorten it"):
        read("a" * (LONGEST_PROMPT + 1))


def test_the_official_columns_are_read(tmp_path: Path) -> None:
    picture = write(tmp_path, "first.png", "")
    file = write(tmp_path, "p.csv", "index, prompt, ref_image_path\n0, a cat, first.png\n1, a dog,\n")
    cat, dog = load_prompts(file)
    assert (cat.text, cat.image, dict(cat.metadata)) == ("a cat", picture, {"index": "0"})
    assert (dog.text, dog.image, dict(dog.metadata)) == ("a dog", None, {"index": "1"})
    two = write(tmp_path, "two.csv", "prompt,image,ref_image_path\na cat,first.png,other.png\n")
    with pytest.raises(ValueError, match="line 2: image and ref_image_path name two images"):
        load_prompts(two)


def test_a_last_image_goes_with_a_first(tmp_path: Path) -> None:
    first, last = write(tmp_path, "first.png", ""), write(tmp_path, "last.png", "")
    (prompt,) = load_prompts(write(tmp_path, "p.csv", "prompt,image,last_image\na cat,first.png,last.png\n"))
    assert (prompt.image, prompt.last_image, dict(prompt.metadata)) == (first, last, {})
    assert prompt != Prompt("a cat", image=first)
    with pytest.raises(ValueError, match="no image for the first frame"):
        load_prompts(write(tmp_path, "alone.csv", "prompt,last_image\na cat,last.png\n"))


def test_files_of_a_prompt_are_columns_and_each_makes_it_another_prompt() -> None:
    files = {name: Path(f"{name}.x") for name in ("image", "last_image")}
    whole = Prompt("a", **files)
    assert whole.columns() == {name: f"{name}.x" for name in files}
    assert whole.columns(absolute=True)["image"] == str(Path("image.x").absolute())
    assert whole.files == tuple(files.values())
    others = [replace(whole, **change) for change in ({"seed": 1}, *({one: None} for one in files))]
    assert len({whole, *others}) == 4
    with pytest.raises(ValueError, match="clips to start from"):
        prompts_of([{"prompt": "a cat", "source_video": "a.mp4"}])
    with pytest.raises(ValueError, match="places of a clip"):
        prompts_of([{"prompt": "a cat", "conditions": [{"image": "a.png", "frame_index": 8}]}])
    with pytest.raises(ValueError, match="is not text"):
        prompts_of(["half a \ud800 character"])


def test_other_columns_are_metadata_and_prompts_stay_hashable(tmp_path: Path) -> None:
    (prompt,) = load_prompts(write(tmp_path, "p.jsonl", '{"prompt": "a cat", "answer": ["4", {"x": 1}]}\n'))
    assert prompt.metadata == {"answer": ["4", {"x": 1}]}
    assert len({prompt, Prompt("a cat", metadata=prompt.metadata)}) == 1
    assert prompt != Prompt("a cat")
    with pytest.raises(TypeError):
        prompt.metadata["answer"] = "5"  # type: ignore[index]


def test_a_column_that_looks_misspelt_is_pointed_out(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="column 'sed' is metadata for rewards. Did you mean 'seed'"):
        load_prompts(write(tmp_path, "p.csv", "prompt,sed\na cat,1\n"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.txt", "\n# only a comment\n", "holds no prompts"),
        ("p.csv", "prompts\na cat\n", "line 2: there is no column prompt, only prompts. Call 'prompts' prompt"),
        ("p.csv", "prompt,seed\na cat,one\n", "line 2: seed must be a whole number, got 'one'"),
        ("p.csv", "prompt\na cat, sitting\n", 'line 2: more values than columns .* "double quotes"'),
        (
            "p.csv",
            'prompt\n"a cat\na dog\n',
            r"p\.csv, in the row from line 2 on: unexpected end of data. A prompt in quotes ends with a quote",
        ),
        (
            "p.csv",
            'prompt\n"a\ncat"\n"a dog" runs\n',
            r"p\.csv, in the row from line 4 on: .* a quote inside it is written twice",
        ),
        ("p.csv", f"prompt\n{'x' * 200_000}\n", r"p\.csv, in the row from line 2 on: field larger than"),
        ("p.txt", "a cat\na\0 dog\n", r"p\.txt, line 2 has a zero byte: .* \(not UTF-16\)"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
    ],
)
def test_faults_are_named_with_their_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        load_prompts(write(tmp_path, name, text))


@pytest.mark.parametrize("name", ["p.txt", "p.json"])
def test_a_file_that_is_not_utf8_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes("prompt\na café\n".encode("latin1"))
    with pytest.raises(ValueError, match=rf"{name}, line 2: byte 0xe9 is not UTF-8. Save the file as UTF-8"):
        load_prompts(tmp_path / name)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"], ids=repr)
def test_only_ends_of_lines_end_a_prompt(ends: str, tmp_path: Path) -> None:
    """A prompt copied from a page may hold a line separator, which Python would split at."""
    odd = "a cat\u2028sits\x85down\x0cand up"
    texts = {"p.txt": [odd, "a dog"], "p.csv": ["prompt", odd, "a dog"], "p.jsonl": [f'"{odd[:12]}"', '"a dog"']}
    for name, lines in texts.items():
        file = tmp_path / name
        file.write_bytes(ends.join(["\ufeff" + lines[0], *lines[1:], ""]).encode())
        assert load_prompts(file) == [Prompt(odd[:12] if name == "p.jsonl" else odd), Prompt("a dog")], name


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no prompt file .*none\.txt"):
        load_prompts(tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match=r"line 2: there is no image .*gone\.png"):
        load_prompts(write(tmp_path, "p.csv", "prompt,image\na cat,gone.png\n"))


@settings(max_examples=40)
@given(count=st.integers(1, 12), seed=st.integers(0, 99), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_every_prompt_comes_once_per_epoch_however_it_is_taken(count: int, seed: int, sizes: list[int]) -> None:
    stream = PromptStream([Prompt(str(n)) for n in range(count)], seed)
    taken = [prompt.text for size in sizes for prompt in stream.take(size)]
    assert stream.position == len(taken) == sum(sizes)
    for start in range(0, len(taken), count):
        epoch = taken[start : start + count]
        assert max(Counter(epoch).values()) == 1
        assert len(epoch) < count or set(epoch) == {str(n) for n in range(count)}


@settings(max_examples=40)
@given(count=st.integers(1, 12), seed=st.integers(0, 99), skip=st.integers(0, 40), size=st.integers(1, 30))
def test_a_position_is_all_that_a_resumed_stream_needs(count: int, seed: int, skip: int, size: int) -> None:
    prompts = [Prompt(str(n)) for n in range(count)]
    whole, resumed = PromptStream(prompts, seed), PromptStream(prompts, seed)
    whole.take(skip)
    resumed.position = skip
    assert whole.take(size) == resumed.take(size)


def test_epochs_and_seeds_shuffle_differently() -> None:
    prompts = [Prompt(str(n)) for n in range(30)]
    stream, other = PromptStream(prompts, 0), PromptStream(prompts, 1)
    orders = [prompts, stream.take(30), stream.take(30), other.take(30)]
    assert len({tuple(order) for order in orders}) == 4


def test_looking_ahead_stops_at_the_limit_for_all_ranks_alike() -> None:
    a, b, c, d = (Prompt(text) for text in "abcd")
    batches = [[a, b], [a, b], [a, c], [d, c], [b, b]]
    places = [[0], [1]]
    assert look_ahead(batches, places, 1) == batches[:2]  # the second rank would have b and c
    assert look_ahead(batches, places, 2) == batches[:4]  # then the first rank would have a, d and b
    assert look_ahead(batches, places, 3) == batches
    assert look_ahead(batches[3:], places, 1) == batches[3:4]
    assert look_ahead(iter([[a, b]]), [[0, 1]], 1) == [[a, b]]  # one batch is needed whatever the limit
    assert look_ahead([], places, 1) == []
