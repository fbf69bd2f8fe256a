"""Errors in the blind study: pairs, votes, figures and what is copied."""

from __future__ import annotations

from mutants.mutant import Mutant

STATISTICS, PAIRS = ("report/test_study_statistics.py",), ("report/test_study_pairs.py",)
STORE, MATERIAL = ("report/test_study_store.py",), ("report/test_study_material.py",)
SERVER = ("report/test_study_server.py",)

MUTANTS = (
    Mutant(
        "ties count as decided votes",
        "report/study/statistics.py",
        "decided = wins + losses",
        "decided = wins + ties + losses",
        STATISTICS,
    ),
    Mutant(
        "the interval is Wald's in its middle",
        "report/study/statistics.py",
        "centre = share + square / (2 * trials)",
        "centre = share",
        STATISTICS,
    ),
    Mutant(
        "alpha without the correction for small samples",
        "report/study/statistics.py",
        "1 - (everything - 1) * observed / expected",
        "1 - everything * observed / expected",
        STATISTICS,
    ),
    Mutant(
        "answers of units that only one rater judged count as agreement",
        "report/study/statistics.py",
        "for unit in units if len(unit) > 1]",
        "for unit in units if len(unit) > 0]",
        STATISTICS,
    ),
    Mutant(
        "the prior gives each side a whole win",
        "report/study/statistics.py",
        "wins + prior / 2 * compared",
        "wins + prior * compared",
        STATISTICS,
    ),
    Mutant(
        "intervals as if there were the square of the prompts",
        "report/study/statistics.py",
        "multinomial(count, [1 / count] * count, size=draws)",
        "multinomial(count * count, [1 / count] * count, size=draws) / count",
        STATISTICS,
    ),
    Mutant(
        "sides are never swapped",
        "report/study/pairs.py",
        "reversed(sides) if flips[one.first, one.second].pop() else sides",
        "sides",
        PAIRS,
    ),
    Mutant(
        "the same comparisons go to every rater",
        "report/study/pairs.py",
        "key=lambda one: seen.get(one, 0)",
        "key=lambda one: 0",
        PAIRS,
    ),
    Mutant(
        "attention checks all come at the beginning",
        "report/study/pairs.py",
        "tasks.insert(rng.randint(first, max(first, last - 1)), check)",
        "tasks.insert(0, check)",
        PAIRS,
    ),
    Mutant(
        "preferring the spoilt copy passes",
        "report/study/pairs.py",
        "return whole in answers and spoilt not in answers",
        "return whole in answers",
        PAIRS,
    ),
    Mutant(
        "a vote of another rater's task is taken",
        "report/study/store.py",
        '"SELECT id FROM tasks WHERE name = ? AND rater = ? AND shown IS NOT NULL", (name, rater)',
        '"SELECT id FROM tasks WHERE name = ? AND shown IS NOT NULL", (name,)',
        STORE,
    ),
    Mutant(
        "the second of two votes on a task is taken for the first",
        "report/study/store.py",
        "if stored == (nonce, text):",
        "if stored is not None:",
        STORE,
    ),
    Mutant(
        "the clips of the two sides are swapped",
        "report/study/store.py",
        "CASE ?1 WHEN left_name THEN left_method ELSE right_method END",
        "CASE ?1 WHEN left_name THEN right_method ELSE left_method END",
        STORE,
    ),
    Mutant(
        "a foreign page can send a vote",
        "report/study/app.py",
        '.strip().lower() != "application/json"',
        '.strip().lower() == ""',
        SERVER,
    ),
    Mutant(
        "any token opens the results",
        "report/study/app.py",
        "if not token or not await asyncio.to_thread(self.store.is_admin, token):",
        "if not token:",
        SERVER,
    ),
    Mutant(
        "a link in the place of a clip is followed",
        "report/study/material.py",
        "path.is_file() and not path.is_symlink()",
        "path.is_file()",
        (*MATERIAL, *SERVER),
    ),
    Mutant(
        "an answer may be anything",
        "report/study/app.py",
        "isinstance(answer, str) and answer in ANSWERS",
        "True",
        SERVER,
    ),
    Mutant(
        "a rater may ask as often as possible",
        "report/study/app.py",
        "return left >= 1",
        "return True",
        SERVER,
    ),
    Mutant(
        "raters are told which tasks are checks",
        "report/study/app.py",
        '"done": done,',
        '"done": done, "kind": "degraded",',
        SERVER,
    ),
    Mutant(
        "a commit is not waited for until it is on the disk",
        "report/study/store.py",
        '"synchronous=FULL"',
        '"synchronous=NORMAL"',
        STORE,
    ),
    Mutant(
        "tokens are stored as they are",
        "report/study/store.py",
        "return hashlib.sha256(token.encode()).hexdigest()",
        "return token",
        STORE,
    ),
    Mutant(
        "left and right are mixed up in the figures",
        "report/study/results.py",
        '{"left": vote.task.left.method, "right": vote.task.right.method, "tie": None}',
        '{"left": vote.task.right.method, "right": vote.task.left.method, "tie": None}',
        STORE,
    ),
    Mutant(
        "attention checks count as votes",
        "report/study/results.py",
        'if vote.task.kind == "pair" and vote.rater not in left_out]',
        "if vote.rater not in left_out]",
        STORE,
    ),
    Mutant(
        "links lead out of a method's folder",
        "report/study/material.py",
        "real.is_file() and real.is_relative_to(root)",
        "real.is_file()",
        MATERIAL,
    ),
    Mutant(
        "copies keep the title of the original",
        "report/study/material.py",
        "copy.metadata.clear()",
        "new.metadata.update(old.metadata)",
        MATERIAL,
    ),
    Mutant(
        "copies tell when they were made",
        "report/study/material.py",
        "os.utime(file, (0, 0))",
        "os.utime(file)",
        MATERIAL,
    ),
)
