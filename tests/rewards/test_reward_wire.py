"""The wire format: what was sent is what arrives, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from sage_grpo.rewards.serving.wire import (
    WireError,
    content_checksum,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from sage_grpo.types import PartScores


def encoded(videos, prompts, fps):
    pieces, checksum = encode_request(videos, prompts, fps)
    return b"".join(pieces), checksum


def request(seed: int = 0, count: int = 2):
    generator = torch.Generator().manual_seed(seed)
    videos = torch.randint(0, 256, (count, 3, 4, 5, 3), dtype=torch.uint8, generator=generator)
    prompts = [f"prompt {seed} {index} é “x”" for index in range(count)]
    return videos, prompts


def test_round_trip():
    videos, prompts = request()
    body, checksum = encoded(videos, prompts, 23.976)
    decoded = decode_request(body)
    assert torch.equal(decoded.videos, videos)
    assert torch.equal(load(body)["videos"], videos)  # a safetensors file
    assert (decoded.prompts, decoded.fps, decoded.checksum) == (prompts, 23.976, checksum)
    parts = {"z": torch.tensor([1.5, float("nan")]), "a": torch.tensor([0.0, 1.0]), "m": torch.ones(2)}
    parts |= {f"part {letter}": torch.ones(2) for letter in "lkjihgfedcb"}  # a file keeps them in any order
    answer = encode_response(checksum, PartScores(parts, {1: "why"}))
    scores = decode_response(answer, checksum=checksum, count=2)
    found = {name: value.nan_to_num(9).tolist() for name, value in scores.items()}
    assert {name: found.pop(name) for name in "zam"} == {"z": [1.5, 9], "a": [0, 1], "m": [1, 1]}
    assert len(found) == 11
    assert scores.reasons == {1: "why"}


def test_what_is_sent_byte_by_byte():
    """Other languages send requests too: a safetensors file whose header is padded to eight bytes."""
    pieces, checksum = encode_request(torch.arange(12, dtype=torch.uint8).view(1, 1, 2, 2, 3), ["é"], 8)
    assert checksum == hashlib.sha256(b'[[1, 1, 2, 2, 3], ["\\u00e9"], 8.0]' + bytes(range(12))).hexdigest()
    about = {"prompts": '["\\u00e9"]', "fps": "8.0", "checksum": checksum}
    entry = {"dtype": "U8", "shape": [1, 1, 2, 2, 3], "data_offsets": [0, 12]}
    header = json.dumps({"__metadata__": about, "videos": entry}).encode()
    header += b" " * (8 - len(header) % 8)
    assert bytes(pieces[0]) == struct.pack("<Q", len(header)) + header
    assert bytes(pieces[1]) == bytes(range(12))


def test_a_checksum_is_of_everything_that_a_score_depends_on():
    videos, prompts = request()
    checksums = {
        content_checksum(videos, prompts, 8.0),
        content_checksum(videos, prompts, 8.5),
        content_checksum(videos, prompts[::-1], 8.0),
        content_checksum(videos.flip(0), prompts, 8.0),
        content_checksum(videos.view(2, 3, 5, 4, 3), prompts, 8.0),
    }
    assert len(checksums) == 5


def test_an_answer_to_another_request_is_refused():
    first, second = (encoded(*request(seed), 8.0) for seed in (0, 1))
    answer = encode_response(second[1], PartScores({"x": torch.zeros(2)}))
    with pytest.raises(WireError, match="another request"):
        decode_response(answer, checksum=first[1], count=2)
    with pytest.raises(WireError, match="values"):
        decode_response(answer, checksum=second[1], count=3)


@settings(max_examples=60)
@given(st.data())
def test_a_changed_byte_is_never_accepted_as_other_content(data):
    videos, prompts = request()
    body, checksum = encoded(videos, prompts, 8.0)
    place = data.draw(st.integers(0, len(body) - 1))
    changed = bytearray(body)
    changed[place] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode_request(bytes(changed))
    except WireError:
        return
    assert torch.equal(decoded.videos, videos)
    assert (decoded.prompts, decoded.fps, decoded.checksum) == (prompts, 8.0, checksum)


def test_a_prompt_that_would_keep_all_others_waiting_is_refused():
    with pytest.raises(WireError, match="20,001 characters"):
        decode_request(encoded(request()[0], ["a", "a" * 20_001], 8.0)[0])


ZEROS = torch.zeros(1, 1, 2, 2, 3, dtype=torch.uint8)


def changed(metadata: dict[str, str] | None = None, shape: object = (1, 1, 2, 2, 3), raw: bytes | None = None) -> bytes:
    whole = {"prompts": '["a"]', "fps": "8.0", "checksum": content_checksum(ZEROS, ["a"], 8.0)}
    header = {
        "__metadata__": {**whole, **(metadata or {})},
        "videos": {"dtype": "U8", "shape": shape, "data_offsets": [0, 12]},
    }
    text = json.dumps(header).encode() if raw is None else raw
    return struct.pack("<Q", len(text)) + text + bytes(12)


HALF = "\ud800"
FLOATS = {"prompts": '["x"]', "fps": "8", "checksum": ""}
BAD = {
    "empty": b"",
    "endless": struct.pack("<Q", 2**63) + b"{}",
    "nested header": struct.pack("<Q", 50_000) + b"[" * 50_000,
    "no tensors": changed(raw=b'{"__metadata__": {"fps": "8"}}'),
    "floats": save({"videos": torch.zeros(1, 1, 2, 2, 3)}, metadata=FLOATS),
    "bytes with a sign": changed().replace(b'"U8"', b'"I8"'),
    "another place": changed().replace(b"[0, 12]", b"[1, 12]"),
    "vast": changed(shape=[2**40, 2**40]),
    "half a character as prompt": changed(
        {"prompts": json.dumps([HALF]), "checksum": content_checksum(ZEROS, [HALF], 8.0)}
    ),
    "a number of many digits": changed(raw=b'{"a": ' + b"9" * 5000 + b"}"),
    "a number of many digits as prompt": changed({"prompts": "[" + "9" * 5000 + "]"}),
    "a product of many digits": changed(shape=[10**4000, 10**4000, 1, 1, 3]),
    "many dimensions": changed(shape=[1] * 1000 + [12]),
    "an infinite rate": changed({"fps": "inf"}),
    "deep prompts": changed({"prompts": "[" * 50_000}),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_requests_are_refused_also_with_a_right_checksum(name):
    assert decode_request(changed()).prompts == ["a"]
    with pytest.raises(WireError):
        decode_request(BAD[name])


@pytest.mark.parametrize("reasons", ['{"²": "x"}', '{"7": "x"}', "[]", "9" * 5000])
def test_malformed_answers_are_the_wires_errors(reasons: str) -> None:
    checksum = decode_request(changed()).checksum
    answer = encode_response(checksum, PartScores({"x": torch.zeros(1)}))
    (length,) = struct.unpack("<Q", answer[:8])
    metadata = {**json.loads(answer[8 : 8 + length])["__metadata__"], "reasons": reasons}
    with pytest.raises(WireError, match="reasons"):
        decode_response(save(load(answer), metadata=metadata), checksum=checksum, count=1)
