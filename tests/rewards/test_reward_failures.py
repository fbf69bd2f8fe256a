"""A clip that a reward cannot score: what it costs, how often the reward is called, and what is said about it."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
import toy_rewards
from toy_rewards import clips, toy

from sage_grpo.rewards import functions
from sage_grpo.rewards.base import SMALL, CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.member import SHOWN, Failure, RewardFailure, check_failures, describe_failures, merged
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.types import VideoSpec

FPS = 8.0


def prompts(count: int, *bad: int) -> list[str]:
    return ["bad" if index in bad else f"fine {index}" for index in range(count)]


@pytest.mark.parametrize("array", [list, lambda values: np.array(values, dtype=object)])
def test_one_none_costs_its_own_clip_only(array, monkeypatch):
    toy_rewards.CALLS.clear()
    one_none = toy_rewards.one_none
    monkeypatch.setattr(toy_rewards, "one_none", lambda videos, prompts, fps: array(one_none(videos, prompts, fps)))
    scores, report = CompositeReward([toy("one_none", weights={"one_none": 1.0})]).score(clips(5), prompts(5, 2), FPS)
    assert scores.valid.tolist() == [True, True, False, True, True]
    assert scores.total[[0, 1, 3, 4]].tolist() == [6.0] * 4
    assert toy_rewards.CALLS == [5]
    assert [(one.index, one.reason) for one in report.failures] == [(2, "part 'one_none' is None")]


def test_reasons_come_with_the_clip_and_remarks_are_kept():
    composite = CompositeReward([toy("with_reasons")])
    scores, report = composite.score(clips(3), ["two", "bad", "a dog"], FPS)
    assert scores.total[[0, 2]].tolist() == [1.0, 1.0]
    assert [(one.index, one.reason) for one in report.failures] == [(1, "because of bad")]
    assert [(one.index, one.reason) for one in report.remarks] == [(2, "because of a dog")]
    assert composite.names == ("with_reasons",)


def test_a_broken_reward_is_found_by_trying_it_out():
    composite = CompositeReward([toy("mean_level"), toy("raises_on_bad"), toy("too_few", metric_only=True)])
    problem = composite.try_out("a bad prompt")
    assert "'raises_on_bad' failed when it was tried out: TimeoutError: the judge takes too long" in problem
    assert "'too_few'" in problem
    assert "'mean_level'" not in problem
    assert CompositeReward([toy("mean_level")]).try_out("x") == ""
    wrong = CompositeReward([toy("two_parts", weights={"levle": 1.0})])
    assert "Did you mean 'level'" in wrong.try_out("x")


def test_a_clip_that_cannot_be_scored_is_no_fault_and_trying_can_be_left_out():
    assert CompositeReward([toy("nan_on_bad"), toy("one_none")]).try_out("bad", others=[("fine", {})]) == ""
    halves = toy("half_nan", weights={"level": 1.0}, options={"parts": ["level", "broken"]})
    assert CompositeReward([toy("never_finds"), halves]).try_out("x") == ""
    assert CompositeReward([toy("raises_on_bad", try_out=False)]).try_out("bad") == ""


HALVES = {"weights": {"level": 1.0, "broken": 1.0}}


@pytest.mark.parametrize("spec", [toy("only_nan", metric_only=True), toy("half_nan", **HALVES)])
def test_a_reward_that_gives_nothing_but_nan_is_refused(spec):
    problem = CompositeReward([spec]).try_out("one", others=[("two", {}), ("three", {})])
    assert "= nan without a reason, and so for each of 3 prompts (a clip of 17 frames of 64 x 64 at 8 fps" in problem


def test_a_reward_that_needs_the_runs_own_format_is_tried_with_it():
    spec = RewardSpec(name="toy_rewards:Picky", options={"frames": 81})
    composite = CompositeReward([spec])
    assert composite.try_out("x", video=VideoSpec(frames=81, height=16, width=24, fps=16.0)) == ""
    seen = composite._members[0].reward.seen
    small = (1, SMALL.frames, SMALL.height, SMALL.width, 3)
    assert [(shape, fps) for shape, _, fps in seen] == [(small, 16.0), ((1, 81, 16, 24, 3), 16.0)]
    assert "needs 81 frames" in composite.try_out("x", video=VideoSpec(frames=5, height=16, width=24))
    with pytest.raises(RewardConfigError, match=r"has no option 'frams'\. Did you mean 'frames'"):
        CompositeReward([replace(spec, options={"frams": 81})])


REMOTE = RewardSpec(name="remote", weights={"a": 1.0}, options={"urls": ["http://x"]})


@pytest.mark.parametrize(
    ("spec", "size", "calls"),
    [(toy("mean_level"), None, 8), (toy("mean_level"), 0, 20), (REMOTE, None, 20), (REMOTE, 5, 5)],
)
def test_clips_a_call(spec: RewardSpec, size: int | None, calls: int) -> None:
    (member,) = CompositeReward([replace(spec, batch_size=size)])._members
    assert (member.batch(20), member.batch(0)) == (calls, calls if calls < 20 else 1)


def test_the_limit_of_failures_is_the_one_that_was_given():
    check_failures(2, 8, 0.25)
    check_failures(7, 8, 1.0)
    check_failures(0, 0, 0.0)
    with pytest.raises(RewardFailure, match=r"3 of 8 clips .* allowed fraction 0\.25\.\nwhy\n"):
        check_failures(3, 8, 0.25, "why")
    for limit in (0.0, 1.0):
        with pytest.raises(RewardFailure, match=r"None of 8 clips could be scored\.\nwhy\n"):
            check_failures(8, 8, limit, "why")


@pytest.mark.parametrize("count", [2, 9])
def test_one_exception_costs_one_clip_and_a_call_for_each(count):
    composite = CompositeReward([toy("raises_on_bad", batch_size=0)])
    for bad in range(count):
        toy_rewards.CALLS.clear()
        scores, report = composite.score(clips(count), prompts(count, bad), FPS)
        assert [one.index for one in report.failures] == [bad]
        assert scores.valid.sum() == count - 1
        assert [count] + [1] * count == toy_rewards.CALLS
    _, report = composite.score(clips(count), ["bad"] * count, FPS)
    assert [one.index for one in report.failures] == list(range(count))
    assert all("TimeoutError: the judge takes too long" in one.reason for one in report.failures)


def test_paid_judges_are_not_called_again():
    toy_rewards.CALLS.clear()
    scores, report = CompositeReward([toy("asks_a_network")]).score(clips(8), prompts(8, 3), FPS)
    assert not scores.valid.any()
    assert toy_rewards.CALLS == [8]
    assert "in a call of 8 clips" in report.failures[0].reason


def test_what_a_user_did_wrong_is_told_with_file_line_and_source(monkeypatch) -> None:
    def place(function, text):
        lines, first = inspect.getsourcelines(function)
        number = next(number for number, line in enumerate(lines) if text in line)
        return f"{toy_rewards.__file__}, line {first + number}"

    def told(name):
        return CompositeReward([toy(name)]).score(clips(2), ["a", "b"], FPS)[1].failures[1].reason

    assert f"{place(toy_rewards.lost_in_a_library, 'json.loads')}: return json.loads(" in told("lost_in_a_library")
    assert f"({place(toy_rewards.too_few, 'def ')})" in told("too_few")
    with pytest.raises(RewardConfigError, match=r"cannot be set up: OSError: ") as refused:
        CompositeReward([toy("NeedsAFile")])
    assert f"{place(toy_rewards.NeedsAFile, 'raise')}: raise" in str(refused.value)
    monkeypatch.setattr(functions, "__file__", "/site/sage_grpo/rewards/functions.py")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("1 / 0", "/site/other/reward.py", "exec"))  # a package beside this one
    assert functions.where_raised(raised.value) == " (/site/other/reward.py, line 1)"


def test_a_report_names_reward_prompt_and_reason_once_and_counts_the_rest():
    same = [Failure("judge", index, f"prompt\n{index}", "too\ndark") for index in range(24)]
    others = [Failure("judge", 24 + index, "x", f"too bright: {index}") for index in range(5)]
    for given in ([*same[:5], *others, *same[5:]], [*merged(same[:9]), *others, *merged(same[9:])]):
        lines = describe_failures({"judge": 29}, 30, tuple(given)).splitlines()
        assert lines[0] == "judge could not score 29 of 30 clips"
        assert lines[1:3] == ["  judge x24, first on 'prompt 0': too dark", "  judge on 'x': too bright: 0"]
        assert lines[-1] == "  and 1 more"
        assert len(lines) == 1 + SHOWN + 1
    assert describe_failures({"judge": 0}, 9, []) == ""
