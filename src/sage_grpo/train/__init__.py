"""The straight line: prompts -> rollout -> decode -> rewards -> advantages -> update -> anchor."""
