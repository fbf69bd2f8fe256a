"""Errors of `sage-grpo doctor` and of what is refused before a run: faults that go unseen, and advice that leads astray."""

from __future__ import annotations

from mutants.mutant import Mutant

FAULTS = "train/test_doctor_faults.py::"
FILES = "models/test_checkpoint_files.py::"
REWARD_PY, LEARNING_PY, WHOLE_PY = "train/checkup/reward.py", "train/checkup/learning.py", "models/whole.py"
CHANCE = (f"{FAULTS}test_a_reward_that_is_chance_is_told_as_that_and_as_nothing_else",)
STEP = (f"{FAULTS}test_an_update_that_goes_too_far",)
FIT = (f"{FAULTS}test_the_fit_of_statistics_pays_for_its_columns",)
APART = (f"{FAULTS}test_prompts_that_are_not_apart",)
CUT = (f"{FAULTS}test_a_text_encoder_that_was_cut_short",)
LENGTH = (f"{FILES}test_a_file_of_the_wrong_length_is_told_by_its_header",)
CAUSE = (f"{FAULTS}test_what_is_advised_about_equal_scores_depends_on_the_cause",)

MUTANTS = (
    Mutant(
        "the signal counts all members",
        "train/checkup/signal.py",
        "config.batch.prompts * (config.batch.group_size - 1)",
        "config.batch.prompts * config.batch.group_size",
        (f"{FAULTS}test_the_signal_counts_what_a_group_leaves_of_its_members",),
    ),
    Mutant(
        "the signal forgets branches",
        "train/checkup/signal.py",
        "(config.batch.group_size - 1) * config.rollout.window.branches",
        "(config.batch.group_size - 1)",
        (f"{FAULTS}test_the_signal_counts_what_a_group_leaves_of_its_members",),
    ),
    Mutant(
        "the fit's columns cost no degrees of freedom",
        REWARD_PY,
        "freedom = len(videos) - count - len(names)",
        "freedom = len(videos) - count",
        FIT,
    ),
    Mutant(
        "the fit's prompts cost no degrees of freedom",
        REWARD_PY,
        "freedom = len(videos) - count - len(names)",
        "freedom = len(videos) - len(names)",
        FIT,
    ),
    Mutant(
        "the variance that is explained forgets the prompts",
        REWARD_PY,
        "total = float(y.square().sum()) / (len(videos) - count)",
        "total = float(y.square().sum()) / len(videos)",
        FIT,
    ),
    Mutant(
        "the spread within groups forgets the prompts",
        REWARD_PY,
        "freedom = max(1, len(scores) - len(groups.unique()))",
        "freedom = max(1, len(scores) - 1)",
        FIT,
    ),
    Mutant(
        "chance is the batch's fault",
        REWARD_PY,
        "if gap > 0.05 and all(",
        "if gap > 1e9 and all(",
        CHANCE,
    ),
    Mutant(
        "chance is the prompt's fault",
        REWARD_PY,
        "if gap > 0.5 and _is_noise(",
        "if gap > 1e9 and _is_noise(",
        CHANCE,
    ),
    Mutant(
        "a prompt that is drowned in chance is read",
        REWARD_PY,
        "elif all(_is_noise(row - scoring.first, scoring) for row in scoring.swapped):",
        "elif False:",
        (f"{FAULTS}test_a_prompt_that_is_drowned_in_little_chance_is_not_called_read",),
    ),
    Mutant(
        "everything is chance",
        REWARD_PY,
        "return 0 < _rms(difference) <= NOISE * _noise(scoring)",
        "return True",
        (f"{FAULTS}test_a_batch_or_a_prompt_that_matters_more_than_chance_is_still_told",),
    ),
    Mutant(
        "noise is answered with exploration",
        REWARD_PY,
        'if not flat and status != "pass":',
        "if False:",
        CHANCE,
    ),
    Mutant(
        "too much exploration is answered with more", REWARD_PY, "elif overshoots and eta", "elif False and eta", CAUSE
    ),
    Mutant(
        "too much exploration is not looked for",
        "train/checkup/examine.py",
        "overshoots=wild)",
        "overshoots=False)",
        (f"{FAULTS}test_exploring_too_much_is_not_answered_with_more",),
    ),
    Mutant(
        "a step of any length is well",
        LEARNING_PY,
        "graded(largest, warn=FAR, fail=TOO_FAR)",
        '"pass"',
        STEP,
    ),
    Mutant(
        "the step is judged at the learning rate of the warm-up",
        LEARNING_PY,
        "state.updates = max(state.updates, trainer.config.optimizer.warmup_updates)",
        "state.updates = max(state.updates, 0)",
        STEP,
    ),
    Mutant(
        "velocities that are no numbers are well",
        LEARNING_PY,
        "largest = max(gaps) if all(map(math.isfinite, gaps)) else math.inf",
        "largest = max((gap for gap in gaps if math.isfinite(gap)), default=0.0)",
        (f"{FAULTS}test_how_far_an_update_went_is_measured",),
    ),
    Mutant(
        "the way is measured by where it ended",
        LEARNING_PY,
        "gaps = [relative(now, then) for now, then in pairs]",
        "gaps = [relative(then, now) for now, then in pairs]",
        (f"{FAULTS}test_how_far_an_update_went_is_measured",),
    ),
    Mutant(
        "guidance of training and sampling may differ unsaid",
        "train/checkup/sampling.py",
        'if status == "pass" and asked != model.guidance_scale:',
        "if False:",
        (f"{FAULTS}test_guidance_that_is_sampled_but_not_trained",),
    ),
    Mutant(
        "held-out prompts may be trained on",
        "train/preflight.py",
        "seen = sum(_meaning(prompt) in trained for prompt in held_out)",
        "seen = 0",
        APART,
    ),
    Mutant(
        "copies of prompts go unseen",
        "train/preflight.py",
        "copies = len(rows) - len(often)",
        "copies = 0",
        APART,
    ),
    Mutant(
        "prompts of other capitals are others",
        "train/preflight.py",
        '" ".join(prompt.text.split()).casefold()',
        "prompt.text",
        APART,
    ),
    Mutant(
        "one prompt from two noises is a copy",
        "train/preflight.py",
        "(_meaning(one), one.seed, stable",
        "(_meaning(one), 0, stable",
        APART,
    ),
    Mutant("a file may be cut short", WHOLE_PY, "    if size != whole:", "    if size > whole:", LENGTH),
    Mutant(
        "a file may be cut short by a little", WHOLE_PY, "    if size != whole:", "    if size < whole - 4:", LENGTH
    ),
    Mutant(
        "the first tensor's end is the file's",
        WHOLE_PY,
        "max(ends, default=0)",
        "min(ends, default=0)",
        (*LENGTH, f"{FILES}test_every_file_that_is_read_must_be_whole"),
    ),
    Mutant(
        "shards are not looked at",
        WHOLE_PY,
        "            if index.is_file():\n",
        "            if False:\n",
        (f"{FILES}test_every_file_that_is_read_must_be_whole",),
    ),
    Mutant(
        "text encoders are not looked at",
        WHOLE_PY,
        'STEMS = ("diffusion_pytorch_model", "model")',
        'STEMS = ("diffusion_pytorch_model",)',
        CUT,
    ),
    Mutant(
        "a checkpoint is loaded without a look at its files",
        "models/checkpoint.py",
        'already now."""\n    check_lengths(folder)\n',
        'already now."""\n',
        CUT,
    ),
    Mutant(
        "a run starts without a look at its files",
        "train/preflight.py",
        "        check_lengths(resolve(model))\n",
        "        resolve(model)\n",
        CUT,
    ),
    Mutant(
        "a file that breaks later ends the check-up",
        "train/checkup/examine.py",
        "OSError, SafetensorError)",
        "OSError)",
        (f"{FAULTS}test_a_file_that_breaks_later_is_a_finding",),
    ),
)
