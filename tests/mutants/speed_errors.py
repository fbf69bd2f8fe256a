"""Errors in what saves time: reference passes that are left out, parsers that are kept, and the profile."""

from __future__ import annotations

from mutants.mutant import Mutant

REFERENCE = "train/test_reference.py::"
LIVE = (f"{REFERENCE}test_an_anchor_that_is_the_live_policy_takes_no_pass_and_changes_no_bit[toy]",)
INERT = (f"{REFERENCE}test_a_kl_too_small_to_act_is_left_out_after_it_was_measured",)
RESUME = (f"{REFERENCE}test_a_run_that_leaves_passes_out_resumes_to_the_bit",)

MUTANTS = (
    Mutant(
        "the anchor is taken for the live policy one update too long",
        "train/anchor.py",
        "return self.renewed_at == updates",
        "return self.renewed_at >= updates - 1",
        LIVE,
    ),
    Mutant(
        "a renewal inside an iteration is overlooked",
        "train/anchor.py",
        "return self.every is not None and (updates + later) % self.every == 0",
        "return False",
        LIVE,
    ),
    Mutant(
        "an update at the anchor counts as a measurement of its KL",
        "train/reference.py",
        'elif need == "pass":',
        "else:",
        INERT,
    ),
    Mutant(
        "a KL that was not measured is logged",
        "train/reference.py",
        'if need == "inert":',
        'if need == "none":',
        INERT,
    ),
    Mutant(
        "the rest does not see that lambda grows",
        "train/reference.py",
        "return MARGIN * self.peak * kl_lambda < self.limit",
        "return MARGIN * self.peak < self.limit",
        (f"{REFERENCE}test_lambda_that_grows_beyond_what_was_measured_ends_the_rest",),
    ),
    Mutant(
        "a resumed run forgets what was measured",
        "train/state.py",
        'self.reference.load_state_dict(meta.get("reference", {}))',
        "self.reference.load_state_dict({})",
        RESUME,
    ),
    Mutant(
        "every iteration from the named one on is recorded",
        "train/runner.py",
        "if number != trainer.config.profile or not trainer.world.is_main:",
        "if trainer.config.profile is None or number < trainer.config.profile or not trainer.world.is_main:",
        ("train/test_profile.py::test_a_recorded_run_is_the_same_run_and_leaves_traces_and_a_table",),
    ),
    Mutant(
        "a profile records all passes",
        "train/profiler.py",
        "if self._ticks == self.passes:",
        "if self._ticks == 0:",
        ("train/test_profile.py::test_only_the_first_passes_are_recorded",),
    ),
    Mutant(
        "failures of later clips have the numbers of the first ones",
        "rewards/early.py",
        "failures += [replace(one, index=one.index + count) for one in outcome.failures]",
        "failures += outcome.failures",
        ("rewards/test_reward_early.py::test_pieces_give_what_the_whole_gives",),
    ),
    Mutant(
        "a reward on the policy's device begins while clips are decoded",
        "rewards/base.py",
        "if member.spec.overlap and (bool(member.spec.device) or not isinstance(member.reward, Placeable))",
        "if member.spec.overlap",
        ("rewards/test_reward_early.py::test_one_that_shares_the_policys_device_waits",),
    ),
    Mutant(
        "clips are handed on with other clips' prompts",
        "train/trainer.py",
        "shown = [plan.groups[m.group].prompt for m in plan.batches(self.world.rank)[place].members]",
        "shown = [plan.groups[0].prompt for m in plan.batches(self.world.rank)[place].members]",
        ("train/test_settings_arrive.py::test_clips_of_a_rollout_are_scored_with_their_own_prompts",),
    ),
    Mutant(
        "a widened product forgets the adapter's gradient to its input",
        "models/adapted.py",
        "to_x = torch.addmm(to_x, to_low, down) if ctx.needs_input_grad[0] else None",
        "to_x = to_x if ctx.needs_input_grad[0] else None",
        ("models/test_blocks.py::test_an_adapted_product_is_the_sum_of_both",),
    ),
    Mutant(
        "an adapter's scale is left out",
        "models/adapted.py",
        "(scale * up).to(x.dtype)",
        "up.to(x.dtype)",
        ("models/test_blocks.py::test_an_adapted_product_is_the_sum_of_both",),
    ),
    Mutant(
        "attention is computed again although it is to be kept",
        "models/blocks.py",
        "return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE",
        "return CheckpointPolicy.PREFER_RECOMPUTE",
        ("models/test_blocks.py::test_attention_is_computed_once_where_it_is_kept",),
    ),
    Mutant(
        "a rollout holds the graphs of all blocks",
        "models/blocks.py",
        "return _cut(output) if _sampling.get() else output",
        "return output",
        ("models/test_blocks.py::test_a_pass_without_gradients_lets_go_of_every_block",),
    ),
    Mutant(
        "a kernel is taken for a difference within the noise",
        "models/attention.py",
        "CLEARLY = 0.85",
        "CLEARLY = 1.0",
        ("models/test_packed.py::test_the_fastest_kernel_is_taken",),
    ),
    Mutant(
        "blocks keep more than memory allows",
        "parallel/memory.py",
        "if memory(network, dataclasses.replace(job, keep=keep)).total <= room:",
        "if memory(network, dataclasses.replace(job, keep=keep)).total <= 2 * room:",
        ("parallel/test_memory_formula.py::test_blocks_keep_as_much_as_fits",),
    ),
    Mutant(
        "a parser is kept with the defaults of another recipe",
        "configure.py",
        "key = (options, prog, recipes, repr(defaults))",
        'key = (options, prog, recipes, "")',
        ("test_configure.py::test_a_parser_that_was_used_before_starts_from_the_same_defaults",),
    ),
    Mutant(
        "the check-up encodes the prompts of the whole run",
        "train/checkup/examine.py",
        "replace(config.data, encode_ahead=1)",
        "config.data",
        ("train/test_doctor.py::test_healthy_shapes[3]",),
    ),
    Mutant(
        "the fixed order is only wished for",
        "train/same_bits.py",
        "    torch.use_deterministic_algorithms(True)\n",
        "    torch.use_deterministic_algorithms(True, warn_only=True)\n",
        ("train/test_same_bits.py::test_on_a_gpu_torch_adds_in_a_fixed_order_and_does_not_only_warn",),
    ),
    Mutant(
        "the fixed order stays on after a backward pass",
        "train/same_bits.py",
        "        torch.use_deterministic_algorithms(before[0], warn_only=before[1])\n",
        "        pass\n",
        ("train/test_same_bits.py::test_what_a_program_had_asked_torch_for_comes_back",),
    ),
    Mutant(
        "model.deterministic does not reach the backward pass",
        "train/trainer.py",
        "                deterministic=self.config.model.deterministic,\n",
        "",
        ("train/test_same_bits.py::test_a_run_does_its_backward_passes_in_there_and_its_forward_passes_outside",),
    ),
    Mutant(
        "cuDNN's attention has a fixed order, says auto",
        "models/attention.py",
        "        both.remove(AttentionBackendName._NATIVE_CUDNN)\n",
        "        pass\n",
        ("models/test_packed.py::test_a_deterministic_model_has_no_kernel_without_a_fixed_order",),
    ),
    Mutant(
        "cuDNN's attention stays PyTorch's choice",
        "train/same_bits.py",
        "        torch.backends.cuda.enable_cudnn_sdp(False)\n",
        "",
        ("train/test_same_bits.py::test_pytorch_may_not_choose_cudnns_attention_until_a_run_without_the_setting",),
    ),
    Mutant(
        "a plan does not know that a fixed order is slower",
        "train/forecast/costs.py",
        "same_bits=model.deterministic and not self.hardware.is_cpu,",
        "same_bits=False,",
        ("train/test_forecast.py::test_a_plan_knows_what_a_fixed_order_costs",),
    ),
    Mutant(
        "a fixed order is slower in float32 too, says a plan",
        "parallel/speed.py",
        "return job.same_bits and job.compute == COMPUTE",
        "return job.same_bits",
        ("train/test_forecast.py::test_a_plan_knows_what_a_fixed_order_costs",),
    ),
    Mutant(
        "attention's forward and backward pass are slower alike",
        "parallel/speed.py",
        "slower = IN_ORDER_BACKWARD if _in_order(job) else 1.0",
        "slower = IN_ORDER if _in_order(job) else 1.0",
        ("train/test_forecast.py::test_attention_with_a_fixed_order_takes_as_much_longer_as_was_measured",),
    ),
)
