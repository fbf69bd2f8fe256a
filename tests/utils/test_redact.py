"""Keys are shown nowhere: not as they are, not as servers spell them when they repeat what they were sent, not in addresses."""

from __future__ import annotations

import base64
import html
import json
from urllib.parse import quote

import pytest

from sage_grpo.utils.redact import hide, hide_inside, parse_address, read_key

KEY = 'sk-"A/b+c=&<d>\\0123456789'


@pytest.mark.parametrize(
    "spell",
    [
        str, str.upper, repr, quote, lambda key: quote(key, safe=""), json.dumps, html.escape, lambda key: f"Bearer {key}!",
        lambda key: base64.b64encode(key.encode()).decode(), lambda key: base64.urlsafe_b64encode(key.encode()).decode(),
        lambda key: json.dumps({"headers": {"authorization": f"Bearer {key}"}}),
    ],
)  # fmt: skip
def test_a_key_is_hidden_however_it_is_spelt(spell) -> None:
    text = hide(f"401: you sent {spell(KEY)}, which is wrong", KEY)
    assert "0123456789" not in text
    assert spell(KEY) not in text
    assert text.startswith("401: you sent ")
    assert text.endswith(", which is wrong")
    assert hide(json.dumps("\\sk"), "\\sk") == '"***"', "the longest spelling first: none leaves a rest"


def test_a_text_without_secrets_stays_as_it_is() -> None:
    text = "http://host:8765/score?steps=3&api-version=2 answered 500: optimizer.lr=1e-5; me@host; a/b@main"
    # An error may hold a whole file. What grows with the square of its length would not end here.
    for one in (text, "x" * 300_000):
        assert hide(one) == hide(one, KEY) == one


@pytest.mark.parametrize("name", ["key", "api_key", "X-Token", "sig", "auth", "password", "secret", "code"])
def test_secrets_in_addresses_are_hidden(name: str) -> None:
    for url in (f"http://host/v1?{name}=abc123", f"https://host?steps=3&{name}=abc123", f"http://host/#{name}=abc123"):
        text = hide(f"No answer from {url!r}, {url} and [{url}]")
        assert "abc123" not in text
        assert "host" in text


def test_logins_in_addresses_are_hidden() -> None:
    assert hide("at https://me:abc123@host/v1") == "at https://***@host/v1"
    assert hide_inside({"urls": ["http://me:abc123@host"], "n": 3}) == {"urls": ["http://***@host"], "n": 3}


KEYED = ("me@host", "me:abc123@host", "host?key=abc123", "host/v1#token=abc123")


@pytest.mark.parametrize("url", [*map("http://{}".format, KEYED), "x://host?key=abc123"])
def test_an_address_with_a_key_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match="OPTION") as refused:
        parse_address(url, "The url", "http://host", "OPTION")
    assert "abc123" not in str(refused.value)


def test_an_address_is_taken_apart_and_what_is_none_is_refused() -> None:
    for url in (*("", "host", "ftp://host", "http://", "http://host:x"), "http://host:99999", "http://[::1", None, 5):
        with pytest.raises(ValueError, match="The url looks like http://host"):
            parse_address(url, "The url", "http://host", "OPTION")
    parsed = parse_address("https://host:8765/v1?api-version=3", "The url", "http://host", "OPTION")
    assert (parsed.hostname, parsed.port, parsed.path, parsed.query) == ("host", 8765, "/v1", "api-version=3")


@pytest.mark.parametrize(
    ("variable", "value"), [("sk-abc123", "x"), ("A_KEY", "abc123\r\nX: y"), ("A_KEY", "abc 123"), ("A_KEY", "abc123é")]
)
def test_what_is_no_key_is_refused_without_showing_it(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header with a line end in it would end in an error that prints the header."""
    monkeypatch.setenv("A_KEY", f" {KEY}\n")
    assert read_key("A_KEY", "OPTION") == KEY
    assert read_key("NO_SUCH_KEY_HERE", "OPTION") == ""
    monkeypatch.setenv("A_KEY", value)
    with pytest.raises(ValueError, match="key") as refused:
        read_key(variable, "OPTION")
    assert "abc" not in str(refused.value)
