"""The line: prompts -> rollout -> decode -> rewards -> advantages -> update -> anchor; and the one loop around it."""
