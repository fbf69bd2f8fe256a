"""Small studies for tests: clips of a few frames, a server in a process that can be killed, and plain requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import needs
from sage_grpo.data.prompts import Prompt
from sage_grpo.tools.study.making import StudyPlan, invite, make, open_study
from sage_grpo.tools.study.pairs import Shown
from sage_grpo.tools.study.store import Store, Study
from sage_grpo.types import Sound
from sage_grpo.utils.video import write_mp4

BRIGHTNESS = {"sage": 200, "flow": 120, "base": 40}
"""Method -> gray of its clips: what a browser sees tells the method."""


def folders(
    root: Path, prompts: int, methods: Mapping[str, int] = BRIGHTNESS, sound: Sound | None = None
) -> dict[str, Path]:
    found = {}
    for name, grey in methods.items():
        clip = torch.full((4, 64, 64, 3), grey, dtype=torch.uint8)
        first = write_mp4(root / name / "0000-clip.mp4", clip, 8, sound=sound)
        for place in range(1, prompts):
            shutil.copy(first, first.with_name(f"{place:04d}-clip.mp4"))
        found[name] = root / name
    return found


def study(prompts: int = 3, methods: int = 3, **more: object) -> Study:
    """What a study of a few prompts asks; it needs no videos."""
    settings = {"against": None, "checks": 0, "max_failed": 0.25, "pool": [], "seed": 5}
    settings |= {"dimensions": {"quality": "Which?"}, **more}
    return Study(
        title="t",
        methods=[f"m{number}" for number in range(methods)],
        prompts=[f"p{number}" for number in range(prompts)],
        **settings,  # type: ignore[arg-type]
    )


def created(file: Path, made: Study) -> Store:
    clips = {
        (prompt, shown): f"{prompt}-{shown.method}-{shown.degraded}.mp4"
        for prompt in range(len(made.prompts))
        for shown in (Shown(method, spoilt) for method in range(len(made.methods)) for spoilt in (False, True))
    }
    return Store.create(file, made, clips)[0]


def small_study(
    root: Path, *, prompts: int = 4, raters: int = 0, sound: Sound | None = None, **plan: Any
) -> tuple[Path, str, list[str]]:
    """A study in root/study: its folder, the token of its results and those of its raters."""
    texts = plan.pop("texts", [f"prompt {place}" for place in range(prompts)])
    settings = {"title": "A study", "seed": 1, **plan}
    token, notes = make(
        root / "study",
        StudyPlan(methods=folders(root, prompts, sound=sound), prompts=[Prompt(text) for text in texts], **settings),
    )
    assert not notes
    with contextlib.closing(open_study(root / "study")) as store:
        return root / "study", token, [invite(store)[1] for _ in range(raters)]


class Server:
    """`sage-grpo study serve` in a process."""

    def __init__(self, study: Path, *options: str, port: int | None = None) -> None:
        self.study, self.options, self.port = study, options, port or needs.free_port()
        self.start()

    def start(self) -> None:
        """Start it, also again after `kill`; returns when it answers."""
        command = [sys.executable, "-m", "sage_grpo", "study", "serve", "--study", str(self.study)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *self.options], env=environment, stdout=subprocess.DEVNULL
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            assert self.process.poll() is None, "the server stopped"
            with contextlib.suppress(OSError):
                if call(self.port, "GET", "/health")[0] == 200:
                    return
            time.sleep(0.05)
        raise TimeoutError("the server did not start")

    def kill(self) -> None:
        """The hard way: nothing can be tidied up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(study: Path, *options: str) -> Iterator[Server]:
    server = Server(study, *options)
    try:
        yield server
    finally:
        server.kill()


def call(
    port: int, method: str, path: str, *, token: str = "", body: Any = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """One request: status, body and headers in small letters. A body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token:
        sent.setdefault("Authorization", f"Bearer {token}")
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    if body is not None:
        sent.setdefault("Content-Type", "application/json")
    try:
        connection.request(method, path, body=body, headers=sent)
        response = connection.getresponse()
        return response.status, response.read(), {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()


def ask(port: int, token: str) -> Any:
    status, body, _ = call(port, "GET", "/api/task", token=token)
    assert status == 200, body
    return json.loads(body)


def vote_for(state: Any, answer: str = "left", nonce: str = "0" * 32) -> dict[str, Any]:
    return {
        "task": state["task"]["name"],
        "nonce": nonce,
        "answers": {one["name"]: answer for one in state["dimensions"]},
    }
