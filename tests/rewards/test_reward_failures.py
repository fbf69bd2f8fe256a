"""A clip that a reward cannot score: what it costs, how often the reward is called, and what is said about it."""

from __future__ import annotations

import inspect
import math

import pytest
import toy_rewards
from toy_rewards import clips, toy

from sage_grpo.rewards.base import SMALL, CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.member import Failure, FailureReport, RewardFailure, check_failures, describe_failures
from sage_grpo.rewards.spec import RewardSpec, load_reward
from sage_grpo.types import VideoSpec

FPS = 8.0


def prompts(count: int, *bad: int) -> list[str]:
    return ["bad" if index in bad else f"fine {index}" for index in range(count)]


@pytest.mark.parametrize("name", ["one_none", "one_none_in_numpy"])
def test_one_none_costs_its_own_clip_only(name):
    toy_rewards.CALLS.clear()
    scores, report = CompositeReward([toy(name)]).score(clips(5), prompts(5, 2), FPS)
    assert scores.valid.tolist() == [True, True, False, True, True]
    assert scores.total[[0, 1, 3, 4]].tolist() == [6.0] * 4
    assert toy_rewards.CALLS == [5]
    assert [(one.index, one.reason) for one in report.failures] == [(2, f"part '{name}' is None")]


@pytest.mark.parametrize("count", [2, 5, 8, 16])
def test_one_exception_costs_one_clip_and_a_bounded_number_of_calls(count):
    for bad in range(count):
        toy_rewards.CALLS.clear()
        composite = CompositeReward([toy("raises_for_bad", batch_size=0)])
        scores, report = composite.score(clips(count), prompts(count, bad), FPS)
        assert [one.index for one in report.failures] == [bad]
        assert scores.valid.sum() == count - 1
        assert len(toy_rewards.CALLS) <= 1 + 2 * math.ceil(math.log2(count))


def test_a_judge_that_is_down_is_not_asked_for_every_clip():
    toy_rewards.CALLS.clear()
    _, report = CompositeReward([toy("raises_for_bad", batch_size=0)]).score(clips(16), ["bad"] * 16, FPS)
    assert len(toy_rewards.CALLS) <= 9
    assert [one.index for one in report.failures] == list(range(16))
    assert all("TimeoutError: the judge takes too long" in one.reason for one in report.failures)


@pytest.mark.parametrize(
    "spec", [toy("raises_for_bad", isolate_failures=False), toy("asks_a_network")], ids=["told", "async"]
)
def test_paid_judges_are_called_once(spec):
    toy_rewards.CALLS.clear()
    scores, report = CompositeReward([spec]).score(clips(8), prompts(8, 3), FPS)
    assert toy_rewards.CALLS == [8]
    assert not scores.valid.any()
    assert "in a call of 8 clips" in report.failures[0].reason


def test_an_async_judge_is_called_again_only_when_asked_to():
    scores, _ = CompositeReward([toy("asks_a_network", isolate_failures=True)]).score(clips(8), prompts(8, 3), FPS)
    assert scores.valid.sum() == 7
    remote = RewardSpec(name="remote", weights={"a": 1.0}, options={"urls": ["http://x"]}, isolate_failures=True)
    with pytest.raises(RewardConfigError, match="never called again"):
        CompositeReward([remote])


def test_reasons_come_with_the_clip_and_remarks_are_kept():
    composite = CompositeReward([toy("with_reasons")])
    scores, report = composite.score(clips(3), ["a cat", "bad", "a dog"], FPS)
    assert scores.total[[0, 2]].tolist() == [1.0, 1.0]
    assert [(one.index, one.reason) for one in report.failures] == [(1, "nobody is in the picture")]
    assert [(one.index, one.reason) for one in report.remarks] == [(2, "a dog")]
    assert composite.names == ("with_reasons",)


def test_a_report_names_reward_prompt_and_reason_and_counts_the_rest():
    failures = [Failure("judge", index, f"prompt\n{index}", "too\ndark") for index in range(7)]
    report = FailureReport(tuple(failures), failed=7, total=9)
    text = describe_failures(report.counts(), report.total, [one.describe() for one in report.failures])
    assert "judge could not score 7 of 9 clips" in text
    assert "judge on 'prompt 0': too dark" in text
    assert "and 2 more" in text
    assert describe_failures({"judge": 0}, 9, []) == ""


def test_a_broken_reward_is_found_by_trying_it_out():
    composite = CompositeReward([toy("mean_level"), toy("raises_for_bad"), toy("too_few", metric_only=True)])
    problem = composite.try_out("a bad prompt")
    assert "'raises_for_bad' failed when it was tried out: TimeoutError: the judge takes too long" in problem
    assert "'too_few'" in problem
    assert "'mean_level'" not in problem
    assert "try_out: false" in problem
    assert composite.seconds == {}
    assert CompositeReward([toy("mean_level")]).try_out("x") == ""
    wrong = CompositeReward([toy("two_parts", weights={"levle": 1.0})])
    assert "Did you mean 'level'" in wrong.try_out("x")


def test_a_clip_that_cannot_be_scored_is_no_fault_and_trying_can_be_left_out():
    assert CompositeReward([toy("nan_on_bad"), toy("one_none")]).try_out("bad") == ""
    assert CompositeReward([toy("raises_for_bad", try_out=False)]).try_out("bad") == ""


def test_every_built_in_reward_without_files_can_score_the_small_clip():
    specs = [
        RewardSpec(name="shapes", weights={"VQ": 1.0}),
        RewardSpec(name="shapes_proxy"),
        RewardSpec(name="video_stats", metric_only=True),
    ]
    assert CompositeReward(specs).try_out("a cat") == ""


def test_a_reward_that_needs_the_runs_own_format_is_tried_with_it():
    spec = RewardSpec(name="toy_rewards:Picky", options={"frames": 81})
    composite = CompositeReward([spec])
    assert composite.try_out("x", video=VideoSpec(frames=81, height=16, width=24, fps=16.0)) == ""
    seen = composite._members[0].reward.seen
    assert [shape for shape, _, _ in seen] == [
        (1, SMALL.frames, SMALL.height, SMALL.width, 3),
        (1, 81, 16, 24, 3),
    ]
    assert [fps for _, _, fps in seen] == [16.0, 16.0]
    assert "needs 81 frames" in composite.try_out("x", video=VideoSpec(frames=5, height=16, width=24))


def test_a_server_that_does_not_answer_is_found_by_trying():
    options = {"urls": ["http://127.0.0.1:9"], "retries": 0, "timeout": 2.0}
    composite = CompositeReward([RewardSpec(name="remote", weights={"a": 1.0}, options=options)])
    assert "127.0.0.1:9" in composite.try_out("x")


def test_the_limit_of_failures_is_the_one_that_was_given():
    """None of the clips scored stops a run at any limit, and is not told as a limit of 0."""
    check_failures(2, 8, 0.25)
    check_failures(7, 8, 1.0)
    check_failures(0, 0, 0.0)
    with pytest.raises(RewardFailure, match=r"3 of 8 clips .* allowed fraction 0\.25\.\nwhy\n"):
        check_failures(3, 8, 0.25, "why")
    for limit in (0.0, 0.25, 1.0):
        with pytest.raises(RewardFailure, match=r"None of 8 clips could be scored\.\nwhy\n") as stopped:
            check_failures(8, 8, limit, "why")
        assert "fraction" not in str(stopped.value)


def _line_of(function: object, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def test_what_a_users_reward_raises_names_its_file_line_and_source() -> None:
    report = CompositeReward([RewardSpec(name="toy_rewards:lost_in_a_library")]).score(clips(2), ["a", "b"], 8.0)[1]
    line = _line_of(toy_rewards.lost_in_a_library, "json.loads")
    for failure in report.failures:  # the library's own frames are not the place to look at
        assert f"{toy_rewards.__file__}, line {line}: return json.loads(" in failure.reason


def test_a_wrong_return_names_the_function_that_gave_it() -> None:
    report = CompositeReward([RewardSpec(name="toy_rewards:too_few")]).score(clips(2), ["a", "b"], 8.0)[1]
    assert f"({toy_rewards.__file__}, line {_line_of(toy_rewards.too_few, 'def ')})" in report.failures[0].reason


def test_a_users_class_that_cannot_be_set_up_names_the_line() -> None:
    line = _line_of(toy_rewards.NeedsAFile, "raise")
    with pytest.raises(RewardConfigError, match=rf"cannot be set up: OSError: .*toy_rewards.py, line {line}: raise"):
        load_reward(RewardSpec(name="toy_rewards:NeedsAFile"))
