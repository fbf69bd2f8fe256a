"""The judge against a fake endpoint: what it sends, what it makes of answers, what it does when they fail."""

from __future__ import annotations

import base64
import io
import json
import threading
from typing import Any

import numpy as np
import pytest
import torch
from judge_server import Reply, completion, judge_server
from PIL import Image

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.built_in.vlm_judge import (
    Endpoint,
    EndpointFailure,
    Unreadable,
    VlmJudge,
    read_answer,
)
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.http_client import Connections, RetryOptions
from sage_grpo.rewards.spec import RewardSpec

KEY = "sk-very-secret-0123456789"
QUICK = {"backoff": 0.001, "max_wait": 1.0, "retries": 2, "timeout": 5.0}
GOOD = {"look": {"reason": "sharp", "score": 7}, "move": {"reason": "smooth", "score": 4.5}}
LOOKS = {"look": "how it looks", "move": "how it moves"}


def judge(url: str, **options: Any) -> VlmJudge:
    options.setdefault("network", QUICK)
    return VlmJudge(url=url, model="m-1", dimensions=LOOKS, **options)


def clips(count: int = 1, frames: int = 8) -> torch.Tensor:
    levels = torch.arange(count).view(-1, 1) * 40 + torch.arange(frames) * 3 + 10
    return levels.view(count, frames, 1, 1, 1).expand(-1, -1, 32, 48, 3).to(torch.uint8).contiguous()


def test_frames_prompt_and_settings_are_sent_and_scores_with_reasons_come_back(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server(completion(GOOD)) as server:
        reward = judge(server.url, key_env="JUDGE_KEY", body={"seed": 7}, frames={"num_frames": 2, "max_side": 24})
        result = reward(clips(), ["a red ball"], 8.0)
    assert (result["look"].tolist(), result["move"].tolist()) == ([7.0], [4.5])
    assert "look: sharp; move: smooth" in result.reasons[0]
    headers, body = server.asked[0]
    assert headers[":path"] == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert (body["model"], body["temperature"], body["seed"]) == ("m-1", 0.0, 7)
    assert body["response_format"] == {"type": "json_object"}
    _, *pictures = body["messages"][1]["content"]
    assert all(picture["image_url"]["url"].startswith("data:image/jpeg;base64,") for picture in pictures)
    assert [_image(picture).size for picture in pictures] == [(24, 16)] * 2


TOLD = """Frames of one video of 1.60 s, taken at 0.24, 0.80, 1.28 s.
Prompt of the video:
<prompt>
a red ball
</prompt>
Score each dimension from 0 (worst) to 10 (best):
- look: how it looks
- move: how it moves
Answer with one JSON object and nothing else: {"look": {"reason": "one sentence", "score": number}, "move": {"reason": "one sentence", "score": number}}"""


def test_the_judge_is_told_what_it_sees_and_when() -> None:
    body = json.loads(judge("https://host/v1", frames={"num_frames": 3}).request(clips(1, 20)[0], "a red ball", 12.5))
    text, *pictures = body["messages"][1]["content"]
    shown = [round((float(np.asarray(_image(one)).mean()) - 10) / 3) for one in pictures]
    assert (text["text"], shown) == (TOLD, [3, 10, 16])


def _image(picture: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(picture["image_url"]["url"].partition(",")[2])))


def test_an_unreadable_answer_is_asked_for_once_more_and_then_masks_the_clip():
    with judge_server([completion("sorry"), completion(GOOD)]) as server:
        assert judge(server.url)(clips(), ["x"], 8.0)["look"].tolist() == [7.0]
        assert len(server.asked) == 2
    with judge_server(completion({"look": 70, "move": 1})) as server:
        result = judge(server.url)(clips(), ["x"], 8.0)
    assert torch.stack([result["look"], result["move"]]).isnan().all()
    assert "look is 70, outside of 0 to 10" in result.reasons[0]
    assert len(server.asked) == 2
    with judge_server(completion('{"look": {"reason": "it', finish="length")) as server:
        result = judge(server.url, ask_again=0)(clips(), ["x"], 8.0)
    assert "raise max_tokens in body" in result.reasons[0]
    assert len(server.asked) == 1


def _spec(url: str, **options: Any) -> RewardSpec:
    given = {"url": url, "model": "m-1", "dimensions": LOOKS, "network": QUICK, **options}
    return RewardSpec(name="vlm_judge", weights={"look": 1.0, "move": 0.5}, options=given)


class Patience(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return False


@pytest.mark.parametrize(
    ("headers", "least"),
    [
        ({}, [0.5, 1.0, 1.5, 1.5, 1.5]),  # doubled up to max_wait, by the jitter at most halved
        ({"retry-after": "3"}, [3.0, 3.0, 3.0, 3.0, 3.0]),  # at least what is asked for, up to the limit
        ({"retry-after": "0.75"}, [0.75, 1.0, 1.5, 1.5, 1.5]),  # and at least one's own pause
        ({"retry-after": "soon"}, [0.5, 1.0, 1.5, 1.5, 1.5]),
    ],
)
def test_pauses_grow_to_a_limit_and_are_never_shorter_than_asked_for(headers, least, monkeypatch):
    endpoint = Endpoint("https://host/v1", "", RetryOptions(backoff=1.0, max_wait=3.0, retries=5))
    monkeypatch.setattr("sage_grpo.rewards.built_in.vlm_judge.post", lambda *_, **__: (503, headers, b""))
    connections = Connections()
    connections.stop = Patience()
    with pytest.raises(EndpointFailure, match="answered 503"):
        endpoint.ask(b"{}", connections)
    first, *pauses = connections.stop.waits
    assert first == 0
    assert all(low <= pause <= max(low, high) for low, pause, high in zip(least, pauses, [1.0, 2.0, 3.0, 3.0, 3.0]))
    assert len(pauses) == 5


def test_requests_are_limited_retries_included():
    with judge_server(completion(GOOD)) as server:
        reward = judge(server.url, limits={"max_requests": 2}, network={**QUICK, "parallel": 1})
        result = reward(clips(3), list("abc"), 8.0)
        assert (len(server.asked), reward.endpoint.requests) == (2, 2)
        assert result["look"].isfinite().tolist() == [True, True, False]
        assert "max_requests of 2 is spent" in result.reasons[2]
    with judge_server(Reply(500, b"")) as server:
        reward = judge(server.url, limits={"max_requests": 2})
        assert "max_requests of 2 is spent" in reward(clips(), ["x"], 8.0).reasons[0]
        assert len(server.asked) == 2
    with pytest.raises(RewardConfigError, match="limits have no 'max_cost'"):
        judge("https://host/v1", limits={"max_cost": 1.0})


def test_the_key_is_never_told(monkeypatch, caplog, capfd):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level("DEBUG")
    replies = [
        Reply(500, {"error": f"bad key {KEY}"}),
        Reply(200, {"echo": "x" * 188 + KEY}),
        Reply(400, ("y" * 370 + KEY).encode()),
        completion({"look": {"score": 1, "reason": f"I saw {KEY}"}, "move": 1}),
        completion(None, refusal=f"{KEY} is no good key"),
        completion(f"{KEY} {KEY}"),
    ]
    told = []
    for reply in replies:
        with judge_server(reply) as server:
            spec = _spec(server.url, key_env="JUDGE_KEY")
            composite = CompositeReward([spec])
            _, report = composite.score(clips(), ["x"], 8.0)
            told.append(repr(report) + repr(vars(composite._members[0].reward)))
            assert server.asked[0][0]["Authorization"] == f"Bearer {KEY}"
    with judge_server(Reply(401, f"wrong {KEY}".encode())) as server:
        with pytest.raises(RewardConfigError) as error:
            CompositeReward([_spec(server.url, key_env="JUDGE_KEY")]).score(clips(), ["x"], 8.0)[0]
        told.append(str(error.value))
    printed = capfd.readouterr()
    for text in (*told, caplog.text, printed.out, printed.err):
        assert KEY[:12] not in text


def test_what_is_sent_is_what_the_options_say():
    clip = torch.randint(0, 256, (20, 32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def sent(**options: Any) -> dict[str, Any]:
        return json.loads(judge("https://host/v1", **options).request(clip, "x", 4.0))

    def pictures(**frames: Any) -> list[Any]:
        return sent(frames=frames)["messages"][1]["content"][1:]

    assert len(pictures(sample_fps=1.0)) == 5  # of five seconds
    assert len(pictures(sample_fps=1.0, num_frames=2)) == 2
    assert len(str(pictures(jpeg_quality=20))) < 0.6 * len(str(pictures(jpeg_quality=95)))
    assert [_image(one).size for one in pictures(num_frames=1, max_side=30)] == [(30, 20)]
    body = sent(body={"temperature": None, "max_tokens": None, "max_completion_tokens": 9})
    assert body.keys().isdisjoint({"temperature", "max_tokens"})
    assert body["max_completion_tokens"] == 9


@pytest.mark.parametrize(
    "text",
    [
        '{"look": {"score": 7}, "move": {"score": 4.5}}',
        'Let me see {not json}. {"look": 1, "move": 1} is a draft.\nFinal: {"Look": "7/10", "MOVE ": "4.5"} Done.',
        '<think>{"look": 3}</think>{"look": {"score": "7"}, "move": {"score": 4.5, "reason": ""}}',
        "thinking " * 9000 + '{"look": 7, "move": 4.5}',
    ],
)
def test_answers_are_read_strictly_first_and_then_from_inside_the_text(text):
    scores, _ = read_answer(text, ["look", "move"], 0, 10)
    assert scores == {"look": 7.0, "move": 4.5}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("I would say 7 and 4.", "no JSON object"),
        ('{"look": 7, "mov', "no JSON object"),
        ('{"look": 7}', "no JSON object"),
        ('{"look": 7, "move": 11}', "move is 11, outside of 0 to 10"),
        ('{"look": NaN, "move": 1}', "look is nan, outside"),
        ('{"look": true, "move": 1}', "not a number"),
        ('{"look": {"score": null}, "move": 1}', "not a number"),
        ('{"look": "7/100", "move": 1}', "not on the scale"),
        ("{" * 5000, "no JSON object"),
    ],
)
def test_an_answer_without_scores_in_range_is_refused_not_guessed(text, why):
    with pytest.raises(Unreadable, match=why):
        read_answer(text, ["look", "move"], 0, 10)


FAILURES = {
    "a server error": (Reply(500, {"error": "oops"}), "answered 500", 3),
    "nothing chosen": (Reply(200, {"choices": []}), "127.0.0.1", 3),
    "cut off": (Reply(200, b"cut", headers={"Content-Length": "99"}), "127.0.0.1", 3),
    "without end": (completion(json.dumps(GOOD) + " " * 9000), "too large", 3),
    "a wrong request": (Reply(400, {"error": {"message": "image too large"}}), "image too large", 1),
    "nothing left to pay with": (Reply(429, {"error": {"code": "insufficient_quota"}}), "insufficient_quota", 1),
    "too long a pause": (Reply(429, b"", headers={"Retry-After": "3600"}), "3600 s, more than max_wait 1", 1),
    "a refusal": (completion(None, refusal="I cannot judge this."), "the judge refused", 1),
    "a filter": (completion("", finish="content_filter"), "the judge refused", 1),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_may_pass_is_tried_again_and_what_stays_masks_the_clip(name, monkeypatch):
    monkeypatch.setattr("sage_grpo.rewards.built_in.vlm_judge.LARGEST_ANSWER", 5000)
    reply, why, tries = FAILURES[name]
    with judge_server(reply) as server:
        result = judge(server.url)(clips(), ["x"], 8.0)
        assert result["look"].isnan().all()
        assert why in result.reasons[0]
        assert len(server.asked) == tries
    if tries > 1:
        with judge_server([reply, reply, completion(GOOD)]) as server:
            assert judge(server.url)(clips(), ["x"], 8.0)["look"].tolist() == [7.0]


@pytest.mark.parametrize("status", [401, 301])
def test_a_wrong_key_model_or_address_stops_the_run(status):
    with judge_server(Reply(status, b"no", headers={"Location": "http://127.0.0.1:1/"})) as server:
        with pytest.raises(RewardConfigError, match=f"answered {status}"):
            judge(server.url)(clips(), ["x"], 8.0)
        assert len(server.asked) == 1


def test_the_key_comes_from_a_variable_and_is_told_nowhere(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\nInjected: yes")
    names = {"NOT_THERE": "NOT_THERE is empty", KEY: "name of an environment", "JUDGE_KEY": "no key has"}
    given = [("https://host/v1", name, why) for name, why in names.items()]
    addresses = (
        "http://api.example.com/v1",
        "ftp://host/v1",
        f"https://me:{KEY}@host/v1",
        f"https://host/v1?key={KEY}",
    )
    for url, name, why in [*given, *((address, "", ".") for address in addresses)]:
        with pytest.raises(ValueError, match=why) as error:
            judge(url, key_env=name)
        assert KEY not in str(error.value)


def test_every_clip_has_its_own_request_and_its_own_failure():
    pieces = [{"type": "text", "text": text} for text in (json.dumps(GOOD)[:20], json.dumps(GOOD)[20:])]

    def answer(body: dict[str, Any], number: int) -> Reply:
        asked = body["messages"][1]["content"][0]["text"]
        if "good" not in asked:
            return Reply(400, b"no")
        reply = Reply(200, {"choices": [{"message": {"content": pieces}}]})
        reply.seconds = 0.05 * ("slow" in asked)
        return reply if "excellent" not in asked else completion({"look": 9, "move": 4.5})

    with judge_server(answer) as server:
        composite = CompositeReward([_spec(f"{server.url}?api-version=7")])  # as some endpoints want it
        scores, report = composite.score(clips(3), ["good and slow", "bad", "good, excellent"], 8.0)
        assert scores.valid.tolist() == [True, False, True]
        assert scores.total[[0, 2]].tolist() == [7 + 0.5 * 4.5, 9 + 0.5 * 4.5]
        assert report.counts() == {"vlm_judge": 1}
        assert [one.index for one in report.remarks] == [0]
        assert len(server.asked) == 3  # never again for a clip that failed
        assert {headers[":path"] for headers, _ in server.asked} == {"/v1/chat/completions?api-version=7"}
        assert "answered 400" in composite.try_out("bad")
        assert composite.try_out("good") == ""
