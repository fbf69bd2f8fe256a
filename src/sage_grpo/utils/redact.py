"""Secrets in messages, logs and pages: keys, and addresses that hold one. Everything that is shown goes through `hide`."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

HIDDEN = "***"
SECRET = re.compile("key|token|secret|sig|auth|pass|credential|^code$", re.IGNORECASE)
"""Names of query parameters that hold a secret."""
_QUERY = re.compile(r"([?&;#][^\s=&;#?'\"]{0,80})=([^\s&;#'\"<>]+)")
_LOGIN = re.compile(r"([A-Za-z][\w+.-]{0,20}:/{1,2})[^\s/@'\"]+@")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[\x21-\x7e]+")


def hide(text: str, key: str = "") -> str:
    """A text without the key, in any spelling in which a server repeats it, and without secrets in addresses."""
    for spelt in sorted(_spellings(key), key=len, reverse=True) if key else ():
        text = re.sub(re.escape(spelt), HIDDEN, text, flags=re.IGNORECASE)
    text = _LOGIN.sub(rf"\1{HIDDEN}@", text)
    return _QUERY.sub(lambda found: f"{found[1]}={HIDDEN if SECRET.search(found[1][1:]) else found[2]}", text)


def hide_inside(value: Any) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        return {name: hide_inside(inner) for name, inner in value.items()}
    return [hide_inside(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def read_key(variable: str, option: str) -> str:
    """The key in an environment variable, read on each use and never stored; empty where there is none.

    ValueError if the option is not the name of a variable, or its value cannot be a key: neither is shown.
    """
    if not _NAME.fullmatch(variable):
        raise ValueError(f"{option} must be the name of an environment variable that holds the key, not the key.")
    key = os.environ.get(variable, "").strip()
    if key and not _KEY.fullmatch(key):
        raise ValueError(f"The key in {variable} holds spaces, line ends or other signs no key has.")
    return key


def parse_address(url: object, what: str, example: str, option: str) -> SplitResult:
    """The parts of an address for clips and a key; ValueError if it is not an address, or holds a key itself.

    `option` is the option for the name of the key's environment variable.
    """
    try:
        parsed = urlsplit(url) if isinstance(url, str) else SplitResult("", "", "", "", "")
        usable = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
    except ValueError:  # a port that is not a number, a bracket that is not closed
        usable, parsed = False, SplitResult("", "", "", "", "")
    secrets = [name for name, _ in parse_qsl(f"{parsed.query}&{parsed.fragment}", True) if SECRET.search(name)]
    if parsed.username or parsed.password or secrets:
        where = f"the part {secrets[0]!r} of its query" if secrets else "the part before its @"
        raise ValueError(f"{what} must not hold a key ({where}): put it into an environment variable ({option}).")
    if not usable or not re.fullmatch(r"[\x21-\x7e]+", str(url)):
        raise ValueError(f"{what} looks like {example}, got {hide(str(url))!r}.")
    return parsed


def _spellings(key: str) -> set[str]:
    raw = key.encode()
    encoded = {base64.b64encode(raw).decode().rstrip("="), base64.urlsafe_b64encode(raw).decode().rstrip("=")}
    return {key, quote(key, safe=""), quote(key), json.dumps(key)[1:-1], repr(key)[1:-1], html.escape(key), *encoded}
