"""Errors of a run's folder: who may work in it, what makes it this run, and what a save holds."""

from __future__ import annotations

from mutants.mutant import Mutant

LOCK = "train/test_folder_lock.py::"
IDENTITY = "train/test_run_identity.py::"
JOURNAL = "train/test_journal.py::"
SAVING = "train/test_saving.py::"
LOCK_PY, IDENTITY_PY, JOURNAL_PY, CHECKPOINT_PY = (
    "train/folder/lock.py",
    "train/folder/identity.py",
    "train/folder/journal.py",
    "parallel/checkpoint.py",
)
FIELDS = (f"{IDENTITY}test_every_other_field_is_part_of_what_a_run_is",)
PROMPTS = (f"{IDENTITY}test_everything_of_a_prompt_is_its_content",)
BACKGROUND = (f"{SAVING}test_what_is_written_in_the_background_is_the_moment_of_the_save",)
OLD = (f"{JOURNAL}test_a_checkpoint_without_a_copy_keeps_its_own_iteration",)

MUTANTS = (
    Mutant(
        "the lock of a removed file counts",
        LOCK_PY,
        "            if self._is_in_place(stream):\n                return stream",
        "            if True:\n                return stream",
        (
            f"{LOCK}test_the_lock_of_a_file_that_was_removed_keeps_nobody_out",
            f"{LOCK}test_a_file_that_its_owner_removes_while_we_watch_is_not_taken",
        ),
    ),
    Mutant(
        "another run's lock file is removed",
        LOCK_PY,
        "            if self._is_in_place(self._stream):  # someone",
        "            if True:  # someone",
        (f"{LOCK}test_another_runs_lock_is_neither_removed_nor_kept_alive",),
    ),
    Mutant(
        "another run's lock file is kept alive",
        LOCK_PY,
        "if stream is not None and self._is_in_place(stream):  # another",
        "if stream is not None:  # another",
        (f"{LOCK}test_another_runs_lock_is_neither_removed_nor_kept_alive",),
    ),
    Mutant(
        "seeds of prompts are no content",
        IDENTITY_PY,
        "{prompt.text!r} {prompt.seed} {stable",
        "{prompt.text!r} {stable",
        PROMPTS,
    ),
    Mutant(
        "metadata of prompts is no content",
        IDENTITY_PY,
        "{prompt.seed} {stable(dict(prompt.metadata))}",
        "{prompt.seed}",
        PROMPTS,
    ),
    Mutant(
        "the file of a model of one's own is no plugin",
        IDENTITY_PY,
        'names += [config.model.family] if config.model.family and "." in config.model.family else []',
        "names += []",
        (f"{IDENTITY}test_the_file_of_a_model_of_ones_own_counts",),
    ),
    Mutant(
        "a plugin is its name, not its file",
        IDENTITY_PY,
        'sha.update(name.encode() + (b"" if file is None else file.read_bytes()))',
        "sha.update(name.encode())",
        (f"{IDENTITY}test_the_file_of_a_model_of_ones_own_counts",),
    ),
    Mutant(
        "where the files of one's own family lie does not count",
        IDENTITY_PY,
        "json.dumps([spec.family, spec.path, spec.revision])",
        "json.dumps([spec.family])",
        (f"{IDENTITY}test_where_the_files_of_ones_own_family_lie_counts",),
    ),
    Mutant(
        "the shift may change",
        IDENTITY_PY,
        '"model.vae_slicing", "model.path",',
        '"model.vae_slicing", "model.shift", "model.path",',
        FIELDS,
    ),
    Mutant(
        "the negative prompt may change",
        IDENTITY_PY,
        '"data.encode_ahead",\n)',
        '"data.encode_ahead", "model.negative_prompt",\n)',
        FIELDS,
    ),
    Mutant("the rollout may change", IDENTITY_PY, '"rollout.offload",', '"rollout",', FIELDS),
    Mutant(
        "a reward's weights may change",
        IDENTITY_PY,
        'FREE_OF_REWARDS = ("batch_size",',
        'FREE_OF_REWARDS = ("batch_size", "weights",',
        (f"{IDENTITY}test_of_a_reward_only_where_and_how_fast_is_free",),
    ),
    Mutant(
        "fingerprints are not compared",
        IDENTITY_PY,
        "if known.get(name) != identity[name]}",
        'if name != "weights" and known.get(name) != identity[name]}',
        (f"{IDENTITY}test_every_fingerprint_is_compared",),
    ),
    Mutant(
        "the mathematics is not part of the code",
        IDENTITY_PY,
        'OUTSIDE = ("commands",',
        'OUTSIDE = ("commands", "flow",',
        (f"{IDENTITY}test_other_code_is_refused",),
    ),
    Mutant(
        "an old checkpoint loses its last row",
        JOURNAL_PY,
        'rows = [row for row in read_rows(file) if row["iteration"] <= iteration]',
        'rows = [row for row in read_rows(file) if row["iteration"] < iteration]',
        OLD,
    ),
    Mutant(
        "an old checkpoint keeps an evaluation that was not done",
        JOURNAL_PY,
        "    if not evaluated:\n",
        "    if False:\n",
        OLD,
    ),
    Mutant(
        "an evaluation that was cut short takes all before it along",
        JOURNAL_PY,
        'rows = [row for row in rows if row["iteration"] < iteration or "eval/total" not in row]',
        'rows = [row for row in rows if "eval/total" not in row]',
        OLD,
    ),
    Mutant(
        "the background writes weights that go on changing",
        CHECKPOINT_PY,
        'tensor.detach().to("cpu", copy=True)',
        'tensor.detach().to("cpu")',
        BACKGROUND,
    ),
    Mutant(
        "the background writes a state that goes on changing",
        CHECKPOINT_PY,
        "frozen = json.loads(json.dumps(meta))",
        "frozen = meta",
        BACKGROUND,
    ),
    Mutant(
        "the background writes a shallow copy of the state",
        CHECKPOINT_PY,
        "frozen = json.loads(json.dumps(meta))",
        "frozen = dict(meta)",
        BACKGROUND,
    ),
    Mutant(
        "the background writes rows of later",
        CHECKPOINT_PY,
        "self.world, dict(files or {}))",
        "self.world, files or {})",
        BACKGROUND,
    ),
)
