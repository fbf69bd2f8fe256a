"""What a reward could not score: single failures, their report, and the limit at which a run stops."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """One clip that one reward could not score (or, among the remarks, what it said about one that it scored)."""

    reward: str
    """Title of the reward."""
    index: int
    """Index of the clip in the scored batch."""
    prompt: str
    """The clip's prompt."""
    reason: str
    """What happened."""
    raised: bool = False
    """Whether the call itself failed (an exception, a wrong return); else the reward gave up on this clip."""

    def describe(self) -> str:
        """Reward, prompt and reason in one line."""
        prompt, reason = " ".join(self.prompt.split())[:120], " ".join(self.reason.split())[:500]
        return f"{self.reward} on {prompt!r}: {reason}"


class RewardFailure(RuntimeError):
    """More clips than allowed could not be scored."""


@dataclass(frozen=True)
class FailureReport:
    """What went wrong in one call of `CompositeReward.score`."""

    failures: tuple[Failure, ...]
    """Every failure, in the order of the rewards and then of the clips; a clip may fail in several rewards, and in rewards that
    do not count in the total."""
    failed: int
    """Clips without a valid total."""
    total: int
    """Clips scored."""
    remarks: tuple[Failure, ...] = ()
    """Reasons that rewards gave for clips that they did score."""

    def counts(self) -> dict[str, int]:
        """Failures a reward."""
        result: dict[str, int] = {}
        for failure in self.failures:
            result[failure.reward] = result.get(failure.reward, 0) + 1
        return result

    def describe(self, limit: int = 5) -> str:
        """Which rewards, which prompts and why, for people."""
        return describe_failures(self.counts(), self.total, [one.describe() for one in self.failures], limit)


def describe_failures(counts: dict[str, int], total: int, lines: list[str], limit: int = 5) -> str:
    """A line for every reward that failed, then the first failures; empty when there is none."""
    text = [f"{reward} could not score {count} of {total} clips" for reward, count in counts.items() if count]
    text += [f"  {line}" for line in lines[:limit]]
    more = sum(counts.values()) - len(lines[:limit])
    return "\n".join([*text, *([f"  and {more} more"] if more > 0 else [])])


def check_failures(failed: int, total: int, limit: float, report: str = "") -> None:
    """Raise RewardFailure when more than the fraction `limit` of the clips has no valid score, and always when none has one.

    Pure, and apart from scoring: on several ranks the counts are summed first, so all ranks decide alike.
    """
    if total > 0 and failed == total:  # there is nothing to learn from or to compare, however much failure is allowed
        raise RewardFailure(f"None of {total} clips could be scored.\n{report}\nRepair the reward.")
    if total > 0 and failed > limit * total:
        raise RewardFailure(
            f"{failed} of {total} clips could not be scored, more than the allowed fraction {limit:g}.\n"
            f"{report}\n"
            "Repair the reward, or raise the allowed fraction of failures (max_failed_fraction)."
        )
