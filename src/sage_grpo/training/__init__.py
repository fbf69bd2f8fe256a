"""Training: prompts, rollout, decoding, rewards, advantages, updates and reference policy, and the loop around them."""
