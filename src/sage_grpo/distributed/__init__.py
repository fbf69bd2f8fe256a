"""Several processes: world, sharding, sequence parallelism, checkpoints, heartbeats and Ray clusters."""
