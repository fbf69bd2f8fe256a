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
models/test_ltx_conditions.py::test_frames_that_are_given_are_the_pipelines[a
models/test_ltx_conditions.py::test_a_clip_to_start_from_is_the_pipelines[alone
models/test_ltx_conditions.py::test_given_frames_stay_and_the_rest_is_learned[a clip
models/test_video_to_video.py::test_the_lines_of_a_card_load_the_export[True
models/test_video_to_video.py::test_a_saved_video_to_video_folder_has_the_pipelines_strength
models/test_ltx2.py::test_latents_of_clips_are_both_vaes_own_once_scaled[ltx2_3
training/test_from_clips.py::test_members_branch_from_one_start[bfloat16
training/test_from_clips.py::test_an_evaluation_shows_what_generate_makes[euler
training/test_given_clips.py::test_clips_with_a_sound_are_learned_with_it
models/test_ltx2.py::test_upsampled_clips_are_the_pipelines
rewards/test_sound.py::test_the_documented_reward_of_picture_and_sound
forecast/test_forecast.py::test_what_is_counted_is_near_what_was_measured[Hunyuan
forecast/test_forecast.py::test_earlier_rollouts_wait_in_cpu_memory[cpu]
models/test_ltx2.py::test_a_first_frame_is_the_pipelines[compressed]
models/test_ltx2.py::test_saved_weights_load_in_diffusers[full]
commands/test_run_folder.py::test_weights_that_are_not_there_are_refused[choice1
training/test_focus.py::test_only_what_explores_has_noise_and_a_ratio[branch]
training/test_reward_gradient.py::test_what_is_sent_is_the_gradient_of_the_mean_reward[draft-3]
training/test_reward_gradient.py::test_clips_that_are_decoded_together_are_differentiated_together
models/test_ltx2.py::test_ode_rollout_is_the_pipeline[ltx2_3-3.0
models/test_families.py::test_ode_rollout_is_the_pipeline[flux2-4.0
models/test_families.py::test_ode_rollout_is_the_pipeline[sana_video-4.0
forecast/test_forecast.py::test_every_target_has_a_forecast[1-hunyuan15]
worlds/scenes/test_scenes_pretrain.py::test_a_run_in_parts_is_the_whole_run
training/test_focus.py::test_a_reward_for_the_sound_leaves_the_picture_alone[nft]
training/test_focus.py::test_a_reward_for_the_sound_leaves_the_picture_alone[branch]
models/test_experts.py::test_a_lora_of_both_loads_in_the_stock_pipeline[wan22_t2v]
training/test_given.py::test_the_trained_step_is_exact[wan_t2v-taylorseer]
training/test_reward_gradient.py::test_for_rewards_of_latents_nothing_is_decoded[sage]
test_inspector.py::test_json_is_all_of_stdout
models/test_families.py::test_a_prompt_over_the_length_is_cut_where_the_pipelines_call_cuts_it[flux2]
models/test_families.py::test_a_prompt_over_the_length_is_cut_where_the_pipelines_call_cuts_it[qwen_image]
models/test_families.py::test_a_prompt_over_the_length_is_cut_where_the_pipelines_call_cuts_it[hunyuan]
doctor/test_doctor_faults.py::test_sampling_that_is_not_the_pipelines[guidance]
training/test_trainer_prompts.py::test_text_encoders_are_dropped_before_training_and_not_needed_again
report/test_report_data.py::test_a_report_that_fails_is_a_warning
doctor/test_doctor.py::test_an_objective_without_exploration_is_healthy[stepwise]
models/test_parity.py::test_guiders_are_honoured[config0]
sentinel/test_sentinel_run.py::test_the_step_size_is_lowered_by_a_factor_that_is_saved
sentinel/test_sentinel_run.py::test_the_last_figures_are_those_of_the_last_weights
lab/test_pool.py::test_at_the_end_of_the_budget_nothing_runs_and_what_was_cut_off_is_no_failure
commands/test_bench.py::test_names_that_the_disk_changes_are_noticed
lab/test_summary.py::test_the_report_has_tables_figures_settings_faults_and_machine
sentinel/test_agreement.py::test_a_run_logs_agreement_and_is_continued_to_the_bit
probe/test_ways.py::test_trunks_that_ways_share_change_nothing
worlds/shapes/test_pretrain.py::test_flaws_change_the_share_of_clips_they_claim
training/test_branching.py::test_on_real_architectures[hunyuan15_t2v-False-4.0]
commands/test_generate_command.py::test_images_reach_their_prompts
commands/test_generate_command.py::test_clips_do_not_depend_on_the_batch
lab/test_run.py::test_several_suites_share_runs_and_leave_what_single_calls_leave
training/test_trainer_anchor.py::test_moving_anchor_is_the_policy_at_its_last_renewal[dual-wan_t2v]
models/test_parity.py::test_checkpoint_solver_is_the_pipeline[wan_i2v-scheduler5]
models/test_parity.py::test_scheduler_settings_are_honoured[wan22_t2v-config0]
session/test_runner_resume.py::test_a_damaged_checkpoint_is_passed_over_with_a_warning[flip_a_bit]
session/test_runner_resume.py::test_a_stop_cuts_an_evaluation_short_and_the_continued_run_does_it_again[2-2]
commands/test_run_folder.py::test_a_run_is_drawn
models/test_lora_files.py::test_a_lora_with_adapters_that_nothing_reads_still_loads
models/test_lora_files.py::test_saved_lora_gives_the_trained_velocities[hunyuan15_t2v-high]
models/test_lora_files.py::test_saved_lora_continues
training/test_trainer_equalizer.py::test_equalized_norms_are_level_where_raw_ones_are_not[wan_t2v]
models/test_families.py::test_saved_weights_load_in_diffusers[sana_video]
models/test_told.py::test_an_empty_negative_prompt_is_the_pipelines[sana_video]
training/test_trainer_evaluate.py::test_evaluation_repeats_and_does_not_depend_on_batches_or_history[wan_t2v]
training/test_trainer_kl.py::test_dual_kl_has_no_velocity_gradient_in_the_first_inner_update_and_has_one_after_it[hunyuan15_t2v]
models/test_decoding.py::test_chunks_of_frames_are_the_whole_decode[5]
models/test_policy_replay.py::test_what_blocks_keep_does_not_change_gradients[lora-hunyuan15_t2v]
training/test_stride.py::test_the_learning_rate_follows_until_the_kl_is_at_its_target[2e-05]
sentinel/test_sentinel_run.py::test_a_run_that_diverges_goes_back_too
training/test_trainer_prompts.py::test_encoding_beforehand_changes_nothing
lab/test_unfinished.py::test_what_would_lead_elsewhere_is_made_anew_and_that_is_said
lab/test_unfinished.py::test_a_point_between_evaluations_is_kept_when_the_last_is_long_ago
models/test_parity.py::test_5b_takes_an_image_where_a_prompt_has_one
models/test_parity.py::test_first_and_last_frame_are_the_pipelines[wan22_i2v]
doctor/test_doctor_faults.py::test_guidance_that_is_sampled_but_not_trained
session/test_api.py::test_only_what_was_an_object_is_refused
models/test_parity.py::test_ode_rollout_is_the_pipeline[wan_i2v-4.0]
models/test_parity.py::test_ode_rollout_is_the_pipeline[wan22_i2v-4.0]
lab/test_measure.py::test_a_row_has_the_curve_of_a_run_and_is_the_same_every_time
session/test_api.py::test_a_run_in_a_thread_is_stopped_without_signals_and_continued
forecast/test_forecast_passes.py::test_real_architectures_from_their_config_files[wan22_t2v-branch]
training/test_reward_gradient.py::test_an_excerpt_is_a_part_of_the_clip_and_has_the_gradient_there
sentinel/test_sentinel_run.py::test_a_run_goes_back_to_the_recorded_checkpoint_and_ends
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
