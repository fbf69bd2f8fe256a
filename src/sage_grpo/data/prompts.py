"""Prompts from files, from the package's own sets and from objects that give rows (lists, generators, Hugging Face datasets, data frames); and an
endless shuffled stream of them with a position that can be saved."""

from __future__ import annotations

import csv
import io
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from sage_grpo.config.ranges import check_prompt
from sage_grpo.data.sources import HUB, KINDS, STEMS, TEXTS, PromptSource, Split, dataset_rows, parquet_rows, split_file
from sage_grpo.utils.json_schema import DocumentError, parse_json, shown
from sage_grpo.utils.suggest import did_you_mean, nearest

COLUMNS = ("prompt", "seed", "image", "ref_image_path", "last_image", "source_video", "rewards")
"""Columns with a meaning; `ref_image_path` is the image in the official code's prompt files. All others are metadata."""
ALSO_PROMPT = ("prompt_en", "caption", "input")
"""Other names of the column prompt in public lists; used where there is no column prompt."""
SUFFIXES = (*TEXTS, ".parquet")
SETS = ("starter", "starter_eval")
"""Sets that come with the package: 160 prompts to start with and 40 that are held out, by category."""


@dataclass(frozen=True)
class Prompt:
    """One task for the model."""

    text: str
    seed: int | None = None  # fixes the initial noise of this prompt's clips; None derives it from the run's seed
    image: Path | None = None  # first frame for image-to-video models
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    """The other columns of its row, for rewards."""
    clips: tuple[Path, ...] = ()
    """Clips of it to learn from (data/examples.py): the better one and the worse, or one alone."""
    last_image: Path | None = None  # last frame, for models that go from one picture to another
    rewards: tuple[str, ...] = ()  # titles of the rewards that count for its clips; empty is all
    source: PromptSource | None = field(default=None, compare=False)  # None if the run has one source

    def __post_init__(self) -> None:
        check_prompt(self.text)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.image, self.last_image) if file is not None)

    def columns(self, *, absolute: bool = False) -> dict[str, Any]:
        """The same as columns of a prompt file; `absolute` writes absolute paths."""
        files = {"image": self.image, "last_image": self.last_image}
        return {name: str(file.absolute() if absolute else file) for name, file in files.items() if file is not None}


def load_prompts(source: str | Path, names: Sequence[str] = SETS, *, split: Split = "train") -> list[Prompt]:
    """Read prompts: .txt (one a line, # comments), .csv (columns prompt, seed, image, last_image, rewards), .jsonl (the same keys), .json (a
    list of objects or strings, or an object from ids to them) or .parquet; the file of a split in a folder; a dataset of the hub (hf:owner/name@COMMIT);
    or a set of the package, "starter" or "starter_eval". Other columns become metadata for rewards. `names` are the known names that an error suggests."""
    if not str(source).strip():
        raise ValueError(f"The name of the prompt file is empty: give a file, or one of {', '.join(names)}.")
    if str(source).startswith(HUB):
        rows = dataset_rows(str(source), split)
        return _whole([prompt_of(_row_of(row, where), where, Path()) for where, row in rows], str(source))
    path = Path(__file__).parent / "prompt_sets" / f"{source}.csv" if str(source) in SETS else Path(source)
    if path.is_dir():
        file = split_file(path, split)
        if file is None:
            ends = ", ".join(f"{STEMS[split]}{kind}" for kind in KINDS)
            raise FileNotFoundError(f"The folder {path} has no {split} prompts: none of {ends}.")
        path = file
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no prompt file {path}. Give a .txt, .csv, .json, .jsonl or .parquet file, a folder with one, or one of {', '.join(names)}."
            + did_you_mean(str(source), names)
        )
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: unknown kind of prompt file {path.suffix!r}; use {', '.join(SUFFIXES)}.")
    return _whole([prompt_of(row, where, path.parent) for where, row in rows_in(path)], str(path))


def rows_in(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix == ".parquet":
        yield from ((where, _row_of(row, where)) for where, row in parquet_rows(path))
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}, line {number}: byte {error.object[error.start]:#04x} is not UTF-8. Save the file as UTF-8, for example with "
            f"iconv -f latin1 -t utf8 (or -f utf16) {path}."
        ) from error
    if "\0" in text:
        number = text[: text.index("\0")].count("\n") + 1
        raise ValueError(f"{path}, line {number} has a zero byte: save the file as UTF-8 (not UTF-16).")
    if path.suffix == ".csv":
        yield from _csv_rows(text, path)
    elif path.suffix == ".json":
        try:
            document = parse_json(text, str(path))
        except DocumentError as error:
            raise ValueError(f"{error} One object a line is .jsonl.") from error
        if not isinstance(document, dict | list):
            raise ValueError(f"{path} must hold a list of prompts, or an object from ids to prompts.")
        for number, value in enumerate(document, 1):
            if isinstance(document, dict):
                where = f"{path}, {value!r}"
                yield where, {"id": value, **_row_of(document[value], where)}
            else:
                where = f"{path}, entry {number}"
                yield where, _row_of(value, where)
    else:
        # A prompt may contain the other characters that `splitlines` splits at.
        lines = [words.strip() for words in text.split("\n")]
        comments = sum(words.startswith("#") for words in lines)
        if comments and path.suffix == ".txt":
            warnings.warn(
                f"{path}: lines that begin with # are comments and skipped, {comments} of them.", stacklevel=4
            )
        for number, words in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if path.suffix == ".jsonl" and words:
                yield where, _row_of(parse_json(words, where), where)
            elif words and not words.startswith("#"):
                yield where, {"prompt": words}


def _row_of(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a text, or an object with a prompt, got {shown(value)}.")
    # a data frame has NaN where there is no value
    return {str(name): None if isinstance(one, float) and one != one else one for name, one in value.items()}


def _csv_rows(text: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # strict: a quote that is never closed would take all rows after it into one prompt
    reader = csv.DictReader(io.StringIO(text, newline="\n"), skipinitialspace=True, strict=True)
    start = 1
    try:
        columns = [name.strip() for name in reader.fieldnames or ()]
        start = reader.line_num + 1
        twice = sorted({name for name in columns if name and columns.count(name) > 1})
        if twice:
            raise ValueError(f"{path}: two columns are called {twice[0]!r}; which one counts? Rename one of them.")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row:
                raise ValueError(
                    f'{where}: more values than columns ({", ".join(columns)}). Put a prompt with commas into "double quotes".'
                )
            yield where, {name.strip(): value for name, value in row.items()}
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, in the row from line {start} on: {error}. A prompt in quotes ends with a quote; a quote inside it is written twice."
        ) from error


def prompt_of(row: Mapping[str, Any], where: str, folder: Path) -> Prompt:
    """The prompt of a row; `where` names the row in errors, images are relative to `folder`."""
    column = next((name for name in ("prompt", *ALSO_PROMPT) if name in row), None)
    if column is None:
        near = nearest("prompt", row)
        hint = f" Call {near!r} prompt." if near else ""
        columns = [name for name in row if name not in COLUMNS or row[name] is not None]
        raise ValueError(f"{where}: there is no column prompt, only {', '.join(columns) or 'none'}.{hint}")
    value = _message(row[column])
    if not isinstance(value, str | None):
        raise ValueError(f"{where}: the prompt must be a text, got {shown(value)}.")
    text = (value or "").strip()
    if not text:
        raise ValueError(f"{where}: the prompt is empty. Write what is to be seen, or take the row out.")
    try:
        text.encode()  # JSON can spell lone surrogates, which no tokenizer and no file takes
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {text[:60]!a} is not text ({error.reason}). Save the file as UTF-8.") from error
    seed = row.get("seed")
    if isinstance(seed, float) and seed.is_integer():  # of a data frame's column with gaps
        seed = int(seed)
    try:
        number_or_none = None if seed in (None, "") else int(str(seed))
    except ValueError as error:
        raise ValueError(f"{where}: seed must be a whole number, got {seed!r}.") from error
    if isinstance(row.get("images"), list) and len(row["images"]) == 1:  # Flow-Factory's list of one
        row = {"image": row["images"][0], **{name: value for name, value in row.items() if name != "images"}}
    metadata = {name: value for name, value in row.items() if name not in (*COLUMNS, column)}
    image, last = (_file_of(row, names, where, folder) for names in (("image", "ref_image_path"), ("last_image",)))
    if last is not None and image is None:
        raise ValueError(f"{where}: there is a last_image, {last}, but no image for the first frame.")
    if row.get("source_video"):
        raise ValueError(f"{where}: clips to start from (source_video) are not supported: leave the column out.")
    if row.get("conditions"):
        raise ValueError(
            f"{where}: pictures and clips at places of a clip (conditions) are not supported: a first frame is the column image, a last one last_image."
        )
    rewards = _rewards_of(row.get("rewards"), where)
    return Prompt(text, number_or_none, image, MappingProxyType(metadata), last_image=last, rewards=rewards)


def _message(value: Any) -> Any:
    """The text of a chat with one message of a user, which verl's files have for a prompt; any other value as it is."""
    chat = [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
    texts = [one.get("content") for one in chat if one.get("role") == "user"]
    return texts[0] if len(texts) == 1 else value


def _rewards_of(value: Any, where: str) -> tuple[str, ...]:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) and value else value or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f'{where}: rewards must name the rewards that judge the prompt, such as ["ocr", "clip"], got {shown(value)}.'
        )
    return tuple(dict.fromkeys(names))


def _file_of(row: Mapping[str, Any], columns: Sequence[str], where: str, folder: Path) -> Path | None:
    names = []
    for column in columns:
        value = row.get(column)
        if isinstance(value, Mapping) and value.get("path"):  # of a dataset that does not decode files
            value = value["path"]
        if not isinstance(value, str | Path | None):
            kind = type(value).__name__
            raise ValueError(f"{where}: {column} must be the path of a file, got a {kind}: give its path.")
        names += [str(value)] if value else []
    if not names:
        return None
    if len(set(names)) > 1:
        raise ValueError(f"{where}: {' and '.join(columns)} name two images, {' and '.join(names)}.")
    file = folder / names[0]
    if not file.is_file() and (folder / "images" / names[0]).is_file():  # where Flow-Factory's rows have them
        return folder / "images" / names[0]
    if not file.is_file():
        relative = "the current folder" if folder == Path() else "the prompt file"
        raise FileNotFoundError(f"{where}: there is no {columns[0]} {file} (paths are relative to {relative}).")
    return file


def _whole(prompts: list[Prompt], what: str) -> list[Prompt]:
    """The prompts, at least one; a warning of metadata columns whose names are near known ones, none of which is refused."""
    if not prompts:
        raise ValueError(f"{what} holds no prompts.")
    for name in sorted({name for prompt in prompts for name in prompt.metadata}.difference(ALSO_PROMPT)):
        if hint := did_you_mean(name, COLUMNS, 0.8):
            warnings.warn(f"{what}: column {name!r} is metadata for rewards.{hint}", UserWarning, stacklevel=3)
    return prompts


def too_few(asked: int, count: int, option: str = "evaluate.prompts") -> str:
    if count >= asked:
        return ""
    return f"{option} asks for {asked} prompts to evaluate on, but there are only {count}: every evaluation uses those {count}."


class Shuffled:
    """Prompts in an endless order, shuffled anew every epoch by (key, epoch)."""

    def __init__(self, prompts: Sequence[Prompt], key: str) -> None:
        self.prompts, self.key = prompts, key
        self._epoch: int | None = None
        self._order: list[int] = []

    def at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.prompts)))
            random.Random(f"{self.key}/{epoch}").shuffle(self._order)
        return self.prompts[self._order[place]]


class PromptStream:
    """Endless prompts; `position` is its only state. Of several sources each position draws one by weight, keyed by the seed, and takes its next prompt."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts = list(prompts)
        self.position = 0
        by_source: dict[PromptSource | None, list[Prompt]] = {}
        for prompt in self.prompts:
            by_source.setdefault(prompt.source, []).append(prompt)
        keys = [f"prompts/{seed}"] if len(by_source) == 1 else [f"prompts/{seed}/{n}" for n in range(len(by_source))]
        self._sources = [Shuffled(some, key) for some, key in zip(by_source.values(), keys)]
        self._weights = [1.0 if source is None else source.weight for source in by_source]
        self._draw = random.Random(f"sources/{seed}")
        self._drawn: list[tuple[int, int]] = []
        """Source of every position so far, and the position within it."""
        self._counts = [0] * len(by_source)

    def take(self, count: int) -> list[Prompt]:
        """Take the next prompts, also across the end of an epoch."""
        taken = self.peek(count)
        self.position += count
        return taken

    def peek(self, count: int) -> list[Prompt]:
        return [self._at(self.position + offset) for offset in range(count)]

    def _at(self, position: int) -> Prompt:
        if len(self._sources) == 1:
            return self._sources[0].at(position)
        while len(self._drawn) <= position:  # from the first position on, also in a resumed run
            (number,) = self._draw.choices(range(len(self._weights)), self._weights)
            self._drawn.append((number, self._counts[number]))
            self._counts[number] += 1
        number, place = self._drawn[position]
        return self._sources[number].at(place)


def look_ahead(
    batches: Iterable[Sequence[Prompt]], places: Sequence[Iterable[int]], limit: int
) -> list[Sequence[Prompt]]:
    """As many of the next batches as leave every rank at most `limit` different prompts, and at least one. `places` are the prompts of a batch that
    each rank samples. All ranks compute the same number, so that none waits for another one's encoding."""
    taken: list[Sequence[Prompt]] = []
    seen: list[set[Prompt]] = [set() for _ in places]
    for batch in batches:
        for known, sampled in zip(seen, places):
            known.update(batch[place] for place in sampled)
        if taken and max(map(len, seen)) > limit:
            break
        taken.append(batch)
    return taken


@runtime_checkable
class Frame(Protocol):
    """A pandas data frame, which gives its columns when it is iterated."""

    def iterrows(self) -> Iterable[tuple[Any, Mapping[str, Any]]]: ...


Row = str | Mapping[str, Any] | Prompt  # A row that can become a prompt


def prompts_of(rows: Iterable[Row] | Frame, what: str = "prompts") -> list[Prompt]:
    """Every row as a prompt: a string, a mapping with the columns of a prompt file (`prompt`, and optionally `seed`, `image` and `last_image`;
    others are metadata for rewards), or a Prompt. All rows are read now. `what` names them in errors."""
    if isinstance(rows, (str, bytes, Path)):
        raise ValueError(f"{what} must be rows, got {str(rows)!r}: give a list, or name a file in the config.")
    if isinstance(rows, Mapping):
        raise ValueError(
            f"{what} must be rows, got a {type(rows).__name__} with the keys {', '.join(map(str, rows))[:200]}: choose a split, "
            "such as dataset['train']."
        )
    try:
        given = iter(rows) if not isinstance(rows, Frame) else (dict(row) for _, row in rows.iterrows())
    except TypeError as error:
        raise ValueError(f"{what} must be rows, got a {type(rows).__name__}, which gives none.") from error
    prompts = []
    for number, row in enumerate(given):
        where = f"{what}, row {number}"
        prompts.append(row if isinstance(row, Prompt) else prompt_of(_row_of(row, where), where, Path()))
    return _whole(prompts, what)
