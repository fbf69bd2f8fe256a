"""Several processes: world, sharding, sequence parallelism, checkpoints and heartbeats."""
