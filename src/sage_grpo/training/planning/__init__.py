"""The plan of an iteration: which groups are sampled how, and what every update replays."""
