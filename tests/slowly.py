"""Cases of a test that `make test` leaves to `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values (or tuples of them) for `parametrize`, of which only the quick ones are not slow. One that is not among the values is an error."""
    every = list(values)
    missing = [one for one in quick if one not in every]
    assert not missing, f"there is no case {missing}"
    cases = [one if isinstance(one, tuple) else (one,) for one in every]
    return [one if one in quick else pytest.param(*case, marks=pytest.mark.slow) for one, case in zip(every, cases)]


CASES = """
training/test_reward_gradient.py::test_what_is_sent_is_the_gradient_of_the_mean_reward[refl]
worlds/scenes/test_scenes_pretrain.py::test_a_short_run_lowers_its_losses_and_shows_samples
lab/test_suites.py::test_table2_has_every_method_with_and_without_the_dual_region
models/test_families.py::test_ode_rollout_is_the_pipeline[flux-4.0]
models/test_families.py::test_ode_rollout_is_the_pipeline[sd3-4.0]
models/test_families.py::test_ode_rollout_is_the_pipeline[hunyuan-4.0]
models/test_families.py::test_saved_weights_load_in_diffusers[flux]
models/test_families.py::test_replay_gradients_and_what_blocks_keep[sd3]
models/test_parity.py::test_ode_rollout_is_the_pipeline[hunyuan15_i2v-4.0]
models/test_parity.py::test_ode_rollout_is_the_pipeline[wan22_5b_t2v-4.0]
models/test_parity.py::test_a_shift_of_ones_own[hunyuan15_t2v]
telling/test_profile.py::test_a_recorded_run_is_the_same_run_and_leaves_traces_and_a_table
training/test_given.py::test_the_trained_step_is_exact[hunyuan15_t2v-all]
worlds/scenes/test_reward.py::test_the_loss_recovers_the_order_that_votes_have
benchmarks/test_where.py::test_each_step_runs_with_the_weights_that_its_letter_names
lab/test_suites.py::test_a_smoke_run_gives_every_column[noise-dance 0.5, 6 steps]
test_video_files.py::test_the_same_clip_gives_the_same_file
commands/test_cli.py::test_evaluate_a_run_repeats_its_last_evaluation
report/test_report_data.py::test_a_finished_run_that_is_started_again_keeps_its_report
training/test_sparse_clips.py::test_a_run_has_the_same_figures_and_weights_and_shows_whole_clips
session/test_api.py::test_a_run_with_objects_is_evaluated_with_them
commands/test_run_folder.py::test_a_runs_settings_are_the_defaults
sentinel/test_agreement.py::test_both_looks_together_see_more_than_held_out_clips_alone
commands/test_bench.py::test_rewrites_and_videophys_table
test_inspector.py::test_a_single_step_and_a_single_kernel_can_be_drawn
training/test_reward_gradient.py::test_a_resumed_run_is_the_same_run[adjoint]
training/test_reward_gradient.py::test_a_resumed_run_is_the_same_run[draft]
training/test_reward_gradient.py::test_a_resumed_run_is_the_same_run[refl]
training/test_reward_gradient.py::test_what_is_sent_is_the_gradient_of_the_mean_reward[affine]
training/test_reward_gradient.py::test_what_is_sent_is_the_gradient_of_the_mean_reward[draft-1]
training/test_reward_gradient.py::test_what_is_sent_is_the_gradient_of_the_mean_reward[adjoint]
commands/test_run_folder.py::test_an_export_holds_the_average_when_asked
commands/test_run_folder.py::test_damaged_checkpoints_are_refused
doctor/test_doctor_faults.py::test_faulty_reward[constant-reward spread-fail]
doctor/test_doctor_faults.py::test_faulty_reward[of_batch-reward batch-fail]
doctor/test_doctor_faults.py::test_faulty_reward[of_place-reward batch-fail]
doctor/test_doctor_faults.py::test_faulty_reward[swapped-reward prompt-warn]
forecast/test_forecast.py::test_a_measurement_runs_the_real_blocks[hunyuan15_t2v]
forecast/test_forecast.py::test_an_iteration_that_was_measured
forecast/test_forecast.py::test_changes_are_options_of_train
forecast/test_forecast.py::test_what_to_change_when_it_does_not_fit
forecast/test_forecast_passes.py::test_every_recipe[hunyuan15_lora-
forecast/test_forecast_passes.py::test_real_architectures_from_their_config_files[hunyuan15_t2v-sage]
forecast/test_forecast_passes.py::test_real_architectures_from_their_config_files[wan22_t2v-sage]
models/test_decoding.py::test_chunks_of_frames_are_the_whole_decode[3]
models/test_decoding.py::test_chunks_of_frames_are_the_whole_decode[4]
models/test_exports.py::test_export_stores_what_was_asked_for[bfloat16-None-stored2]
models/test_exports.py::test_export_stores_what_was_asked_for[float32-bfloat16-stored1]
models/test_families.py::test_a_prompt_over_the_length_is_cut_where_the_pipelines_call_cuts_it[flux]
models/test_families.py::test_a_prompt_over_the_length_is_cut_where_the_pipelines_call_cuts_it[sana_video]
models/test_families.py::test_ode_rollout_is_the_pipeline[flux_plain-4.0]
models/test_families.py::test_ode_rollout_is_the_pipeline[hunyuan_plain-4.0]
models/test_families.py::test_ode_rollout_is_the_pipeline[sana_720p-4.0]
models/test_families.py::test_ode_rollout_is_the_pipeline[sd3_two-4.0]
models/test_families.py::test_sana_solver_of_the_published_checkpoint
models/test_parity.py::test_checkpoint_solver_is_the_pipeline[hunyuan15_t2v-scheduler6]
models/test_policy_replay.py::test_what_blocks_keep_does_not_change_gradients[all weights-hunyuan15_t2v]
models/test_policy_replay.py::test_what_blocks_keep_does_not_change_gradients[lora-wan_t2v]
probe/test_probe.py::test_the_snippet_fits_every_recipe[shapes/f
probe/test_probe.py::test_the_snippet_fits_every_recipe[shapes/m
probe/test_probe.py::test_the_snippet_fits_every_recipe[shapes/sage_
probe/test_probe.py::test_the_snippet_fits_every_recipe[shapes/t
rewards/test_videoalign.py::test_positions_are_one_dimensional_on_all_axes[case1]
rewards/test_videoalign.py::test_positions_are_one_dimensional_on_all_axes[case2]
rewards/test_videoalign.py::test_scores_equal_the_reference_for_every_layout[case1]
rewards/test_videoalign.py::test_scores_equal_the_reference_for_every_layout[case2]
session/test_api.py::test_a_tuned_model_beside_its_base
worlds/shapes/test_judge.py::test_each_wrong_attribute_costs[motion]
worlds/shapes/test_judge.py::test_each_wrong_attribute_costs[shape]
worlds/shapes/test_judge.py::test_scores_fall_as_a_fault_grows[blur]
worlds/shapes/test_judge.py::test_scores_fall_as_a_fault_grows[flicker]
worlds/shapes/test_judge.py::test_scores_fall_as_a_fault_grows[jitter]
test_mutants.py::test_an_error_that_hangs_is_noticed_only_where_that_is_stated
test_mutants.py::test_errors_that_are_all_noticed_are_a_success
test_mutants.py::test_survivors_are_named_and_fail_the_command
training/test_branching.py::test_on_real_architectures[hunyuan15_t2v-True-1.0]
training/test_branching.py::test_on_real_architectures[wan_t2v-False-4.0]
training/test_branching.py::test_shared_replay_equals_the_plain_path[mask
training/test_branching.py::test_shared_replay_equals_the_plain_path[scaled
training/test_reference.py::test_an_anchor_that_is_the_live_policy_takes_no_pass_and_changes_no_bit[wan_t2v]
training/test_trainer_anchor.py::test_moving_anchor_is_the_policy_at_its_last_renewal[moving-wan_t2v]
training/test_update_oracle.py::test_gradients_of_every_update_are_those_of_the_formulas[hunyuan15_t2v]
"""
"""Further cases, by where their names begin: those of which another one, or a smaller law, is quick."""


def is_slow(case: str) -> bool:
    """Whether a case (its file under tests, and its name) is one of these."""
    return any(case.startswith(start) for start in CASES.split("\n") if start)
