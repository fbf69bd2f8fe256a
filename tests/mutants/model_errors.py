"""Errors in the models: guidance, scaling, batches, LoRA files, caches."""

from __future__ import annotations

from mutants.mutant import Mutant

PARITY = "models/test_parity.py::"
HUNYUAN = (f"{PARITY}test_ode_rollout_is_the_pipeline[hunyuan15_t2v-4.0]",)
WAN = (f"{PARITY}test_ode_rollout_is_the_pipeline[wan_t2v-4.0]",)
LORA = "models/test_lora_files.py::"
REPLAY = "models/test_policy_replay.py::"

MUTANTS = (
    Mutant(
        "the network is told sigma instead of its timestep",
        "models/family.py",
        "torch.as_tensor(sigma, dtype=torch.float32) * self.num_train_timesteps",
        "torch.as_tensor(sigma, dtype=torch.float32)",
        HUNYUAN,
    ),
    Mutant(
        "the negative prompt is ignored",
        "models/family.py",
        "self._branch_inputs(self.spec.negative_prompt, image, key)",
        'self._branch_inputs("", image, key)',
        WAN,
    ),
    Mutant(
        "guidance extrapolates from the conditional velocity",
        "models/guidance.py",
        "guided = v_negative + scale * (v - v_negative)",
        "guided = v + scale * (v - v_negative)",
        HUNYUAN,
    ),
    Mutant(
        "the guider's rescaling is ignored",
        "models/guidance.py",
        "        if self.rescale == 0:\n            return guided\n",
        "        return guided\n",
        (f"{PARITY}test_guiders_are_honoured",),
    ),
    Mutant(
        "latents are divided by the VAE's scale twice",
        "models/hunyuan15.py",
        "return latents / self.pipe.vae.config.scaling_factor",
        "return latents / self.pipe.vae.config.scaling_factor**2",
        HUNYUAN,
    ),
    Mutant(
        "Wan's latents are divided by their std instead of multiplied",
        "models/wan.py",
        "latents / (1.0 / channels(config.latents_std)) + channels(config.latents_mean)",
        "latents / channels(config.latents_std) + channels(config.latents_mean)",
        WAN,
    ),
    Mutant(
        "Wan's latents keep their mean at 0",
        "models/wan.py",
        "(1.0 / channels(config.latents_std)) + channels(config.latents_mean)",
        "(1.0 / channels(config.latents_std))",
        WAN,
    ),
    Mutant(
        "Wan's text is not padded",
        "models/wan.py",
        '{**inputs, "text": F.pad(text, (0, 0, 0, TEXT_TOKENS - len(text)))}',
        "inputs",
        WAN,
    ),
    Mutant(
        "padding is attended to where it should be masked",
        "models/hunyuan15.py",
        "mask[:, : tokens.shape[1]] = 1",
        "mask[:] = 1",
        ("models/test_packed.py::test_dropped_padding_is_masked_padding[hunyuan15_i2v]",),
    ),
    Mutant(
        "one token of the template is left before the prompt",
        "models/hunyuan15.py",
        "text = states[0, crop:]",
        "text = states[0, crop - 1 :]",
        HUNYUAN,
    ),
    Mutant(
        "the text embedding is one layer too late",
        "models/hunyuan15.py",
        ".hidden_states[-(LAYERS_TO_SKIP + 1)]",
        ".hidden_states[-LAYERS_TO_SKIP]",
        HUNYUAN,
    ),
    Mutant(
        "batches of mixed lengths come back in another order",
        "models/batching.py",
        "[order.argsort().to(x.device)]",
        "[order.to(x.device)]",
        ("models/test_packed.py::test_sub_batches_keep_the_order",),
    ),
    Mutant(
        "pixels are not moved from [-1, 1] to [0, 1]",
        "models/family.py",
        "(pixels * 0.5 + 0.5).clamp(0, 1)",
        "pixels.clamp(0, 1)",
        HUNYUAN,
    ),
    Mutant(
        "the other expert runs at the boundary itself",
        "models/family.py",
        "float(self._timestep(sigma)) >= self.boundary * self.num_train_timesteps",
        "float(self._timestep(sigma)) > self.boundary * self.num_train_timesteps",
        (f"{PARITY}test_two_experts_share_the_noise_range",),
    ),
    Mutant(
        "the second guidance scale is ignored",
        "models/family.py",
        "return self.guidance_scale if second is None or self._high_noise(sigma) else second",
        "return self.guidance_scale",
        (f"{PARITY}test_second_guidance_scale_applies_to_low_noise",),
    ),
    Mutant(
        "the policy ignores its own guidance",
        "models/policy.py",
        "self.model.velocity(x, sigma, conditions, guidance=self.guidance)",
        "self.model.velocity(x, sigma, conditions)",
        ("train/test_settings_arrive.py::test_rollout_and_updates_run_without_guidance_when_asked_to",),
    ),
    Mutant(
        "steps outside the window explore",
        "models/policy.py",
        "kernel = self.kernel if self.schedule.stochastic[index] else Ode()",
        "kernel = self.kernel",
        (f"{REPLAY}test_steps_outside_the_window_are_the_ode",),
    ),
    Mutant(
        "steps of the expert that is not trained are trained",
        "models/policy.py",
        "if float(self.transition(index).std) > 0 and self.model.trains(self.schedule.pair(index)[0])",
        "if float(self.transition(index).std) > 0",
        (f"{PARITY}test_two_experts_share_the_noise_range",),
    ),
    Mutant(
        "the grid ignores the shift that was asked for",
        "models/schedulers.py",
        "**{SHIFT[type(scheduler).__name__]: shift})",
        ")",
        (f"{PARITY}test_a_shift_of_ones_own",),
    ),
    Mutant(
        "the cache of encodings does not know the dtype",
        "models/family.py",
        "/{self.index['_class_name']}/{self.spec.dtype}\"",
        "/{self.index['_class_name']}\"",
        ("models/test_conditioning.py::test_cache_depends_on_all_that_matters",),
    ),
    Mutant(
        "the cache of encodings does not know the checkpoint",
        "models/cache.py",
        "key = digest(FORMAT, self.fingerprint, *parts)",
        "key = digest(FORMAT, *parts)",
        ("models/test_conditioning.py::test_cache_depends_on_all_that_matters",),
    ),
    Mutant(
        "alpha is ignored",
        "models/lora.py",
        "lora_alpha=lora.alpha or lora.rank",
        "lora_alpha=lora.rank",
        (f"{LORA}test_alpha_over_rank_scales_the_adapter",),
    ),
    Mutant(
        "a LoRA is saved without its alpha",
        "models/lora.py",
        'metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(packed, indent=2, sort_keys=True)}',
        'metadata = {"format": "pt"}',
        (f"{LORA}test_saved_lora_gives_the_trained_velocities[wan_t2v-high]",),
    ),
    Mutant(
        "merging ignores the adapter's scale",
        "models/lora.py",
        "merged + module.scaling[adapter] * (up @ down)",
        "merged + (up @ down)",
        (f"{LORA}test_weights_replace_parameters_without_touching_the_model",),
    ),
    Mutant(
        "saving ignores the weights that it is given",
        "models/lora.py",
        '_plain(name)}": weights.get(name, parameter).detach().to("cpu")',
        '_plain(name)}": parameter.detach().to("cpu")',
        (f"{LORA}test_weights_replace_parameters_without_touching_the_model",),
    ),
    Mutant(
        "the VAE's attention looks into the future",
        "models/hunyuan15.py",
        "frame[None, :] > frame[:, None]",
        "frame[None, :] > frame[:, None] + 1",
        ("models/test_packed.py::test_causal_mask_is_the_stock_one",),
    ),
)
