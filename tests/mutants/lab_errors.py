"""Errors of comparisons: statistics, what counts as the same run, what counts as cost, what is kept."""

from __future__ import annotations

from mutants.mutant import Mutant

STATISTICS = "lab/test_statistics.py::"
SUMMARY = "lab/test_summary.py::"
PREPARE = "lab/test_prepare.py::"
MEASURE = "lab/test_measure.py::"
POOL = "lab/test_pool.py::"
UNFINISHED = "lab/test_unfinished.py::"
RUN = "lab/test_run.py::"
WHOLE = f"{UNFINISHED}test_a_run_that_is_cut_off_again_and_again_has_the_row_of_one_that_was_not"

MUTANTS = (
    Mutant(
        "an interval has as many degrees of freedom as seeds",
        "lab/statistics.py",
        "t_quantile(0.5 + level / 2, len(values) - 1)",
        "t_quantile(0.5 + level / 2, len(values))",
        (f"{STATISTICS}test_by_hand",),
    ),
    Mutant(
        "an interval is one-sided",
        "lab/statistics.py",
        "t_quantile(0.5 + level / 2,",
        "t_quantile(level,",
        (f"{STATISTICS}test_95_of_100_intervals_hold_the_true_mean[5]",),
    ),
    Mutant(
        "Holm's adjustment may fall",
        "lab/statistics.py",
        "largest = max(largest, min(1.0, (len(tests) - place) * p))",
        "largest = min(1.0, (len(tests) - place) * p)",
        (f"{STATISTICS}test_holm_by_hand",),
    ),
    Mutant(
        "runs that diverged are in the mean",
        "lab/summary.py",
        'return row["status"] == "done" and str(row["iterations"]) in row["evaluations"]',
        'return row["status"] != "missing"',
        (f"{SUMMARY}test_means_intervals_ways_and_differences",),
    ),
    Mutant(
        "a difference has the wrong sign",
        "lab/summary.py",
        "paired_interval(finals[key], _column(baseline, key))",
        "paired_interval(_column(baseline, key), finals[key])",
        (f"{SUMMARY}test_means_intervals_ways_and_differences",),
    ),
    Mutant(
        "equal passes are those of the dearest arm",
        "lab/summary.py",
        "budget = min(costs)",
        "budget = max(costs)",
        (f"{SUMMARY}test_scores_at_equal_passes_lie_on_the_curve",),
    ),
    Mutant(
        "what drift is at equal passes is taken from the end",
        "lab/summary.py",
        "gaps = {key: paired_interval(own, _at_budget(baseline, key, budget)) for key, own in equal.items()}",
        "gaps = {key: paired_interval(own, _column(baseline, key)) for key, own in equal.items()}",
        (f"{SUMMARY}test_scores_at_equal_passes_lie_on_the_curve",),
    ),
    Mutant(
        "a fault after the end hides a finished run",
        "lab/store.py",
        'or row["status"] in FINISHED or known["status"] not in FINISHED)',
        "or True)",
        (f"{SUMMARY}test_the_finished_row_counts_and_not_a_fault_before_or_after",),
    ),
    Mutant(
        "the seed is no part of a run's key",
        "lab/prepare.py",
        "json.dumps([counted, config.seed, list(points), kind], sort_keys=True)",
        "json.dumps([counted, list(points), kind], sort_keys=True)",
        (f"{PREPARE}test_a_key_goes_by_what_is_computed_and_by_nothing_else",),
    ),
    Mutant(
        "the suite's settings win over the arm's",
        "lab/prepare.py",
        "options |= {**suite.options, **arm.options}",
        "options |= {**arm.options, **suite.options}",
        (f"{PREPARE}test_settings_arrive_in_their_order_and_are_told",),
    ),
    Mutant(
        "the anchor's pass costs nothing",
        "lab/measure.py",
        "(3 + references[u]) * replay.rows for rank",
        "3 * replay.rows for rank",
        (f"{MEASURE}test_passes_are_the_samples_that_went_through_the_network[sage]",),
    ),
    Mutant(
        "what a group shares is counted for every member",
        "lab/measure.py",
        "(3 + references[u]) * replay.rows for rank",
        "(3 + references[u]) * len(replay.members) for rank",
        (f"{MEASURE}test_passes_are_the_samples_that_went_through_the_network[branch]",),
    ),
    Mutant(
        "measuring the step costs nothing",
        "lab/measure.py",
        "return replayed + sum(replay.rows for rank in ranks for replay in plan.gauged(rank))",
        "return replayed",
        (f"{MEASURE}test_passes_are_the_samples_that_went_through_the_network[target]",),
    ),
    Mutant(
        "one base stands for all evaluations",
        "lab/measure.py",
        "[config.model, *config.rewards, config.evaluate, config.data]",
        "[config.model, *config.rewards, config.data]",
        (f"{MEASURE}test_another_model_evaluation_or_prompt_is_another_base[evaluate-seed-77]",),
    ),
    Mutant(
        "a process that failed gets the next job",
        "lab/pool.py",
        'if words["row"]["status"] == "failed":',
        "if False:",
        (f"{POOL}test_a_run_that_fails_or_takes_its_process_along_is_recorded_and_the_others_go_on",),
    ),
    Mutant(
        "a run that the budget cut off counts as failed",
        "lab/pool.py",
        "if self._stopped:  # we ended it",
        "if False:  # we ended it",
        (f"{POOL}test_at_the_end_of_the_budget_nothing_runs_and_what_was_cut_off_is_no_failure",),
    ),
    Mutant(
        "runs are started that cannot end in time",
        "lab/pool.py",
        "self.elapsed + needs <= self.budget",
        "self.elapsed <= self.budget",
        (f"{POOL}test_a_run_that_cannot_end_in_time_is_not_started_and_a_shorter_one_is",),
    ),
    Mutant(
        "a run of unknown pace is taken for a usual one where time is short",
        "lab/pool.py",
        "self._stretch(job), max)",
        "self._stretch(job))",
        (f"{POOL}test_a_run_of_unknown_pace_is_only_begun_where_the_slowest_would_have_time",),
    ),
    Mutant(
        "the start of a run counts as its pace",
        "lab/pool.py",
        "self.estimates.guess(job, now - then, done - at)",
        "self.estimates.guess(job, now - since, done - first)",
        (f"{POOL}test_the_start_of_a_run_is_no_part_of_its_pace",),
    ),
    Mutant(
        "a run that goes on forgets what it was",
        "lab/measure.py",
        "record.load_state_dict(known)",
        "pass",
        (f"{WHOLE}[sage]",),
    ),
    Mutant(
        "a run that goes on looks at its last point twice",
        "lab/measure.py",
        "over = known is None and _look(run)",
        "over = _look(run)",
        (f"{WHOLE}[rollback]",),
    ),
    Mutant(
        "the checkpoint to go back to is not kept",
        "lab/unfinished.py",
        "spare=trainer.state.sentinel.good",
        "spare=None",
        (f"{UNFINISHED}test_what_would_lead_elsewhere_is_made_anew_and_that_is_said",),
    ),
    Mutant(
        "a run goes on with other code",
        "lab/unfinished.py",
        "if other:",
        "if False:",
        (f"{UNFINISHED}test_what_would_lead_elsewhere_is_made_anew_and_that_is_said",),
    ),
    Mutant(
        "a run is not started unless all of it fits",
        "lab/pool.py",
        "needs = self.estimates.seconds(job, self._stretch(job), max) or 0.0",
        "needs = self.estimates.seconds(job, self._ahead(job), max) or 0.0",
        (f"{POOL}test_a_run_that_gets_to_its_next_point_in_time_is_started_from_where_it_was_kept",),
    ),
    Mutant(
        "a run that suites share has the name of the first",
        "lab/run.py",
        '| row | head(job, row["status"], row["error"]) |',
        "| row |",
        (f"{RUN}test_several_suites_share_runs_and_leave_what_single_calls_leave",),
    ),
    Mutant(
        "a run that another suite has is made again",
        "lab/run.py",
        "book.write(known[key])",
        "pass",
        (f"{RUN}test_a_run_that_one_suite_has_is_not_made_for_another_and_a_fault_is_told_to_both",),
    ),
    Mutant(
        "all arms are run",
        "lab/run.py",
        "if part.arms is None or job.arm in part.arms}",
        "}",
        (f"{RUN}test_a_call_for_some_arms_leaves_the_others_missing",),
    ),
    Mutant(
        "a run that failed is forgotten",
        "lab/run.py",
        'if row["status"] in store.FINISHED:\n            self.done',
        "if True:\n            self.done",
        (f"{RUN}test_runs_that_were_cut_off_come_first_and_are_forgotten_with_a_row_that_is_no_fault",),
    ),
    Mutant(
        "a worker outlives whoever asked",
        "lab/worker.py",
        "if asked > answered:",
        "if False:",
        (f"{RUN}test_a_worker_ends_with_whoever_asked_in_the_middle_of_a_run_too",),
    ),
    Mutant(
        "a column is the watching reward's",
        "lab/measure.py",
        "next(reward.title for reward in config.rewards if reward.counts)",
        "config.rewards[0].title",
        ("lab/test_measure.py::test_where_two_rewards_have_a_part_of_one_name_the_plain_name_is_the_trained_ones",),
    ),
    Mutant(
        "a report wants what kept rows lack",
        "lab/report.py",
        "for row in known if part in row})",
        "for row in known})",
        ("benchmarks/test_results.py::test_a_report_can_be_written_of_the_rows_that_are_kept",),
    ),
)
