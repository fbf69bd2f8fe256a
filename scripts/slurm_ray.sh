#!/bin/bash
# One training GPU on the first node, workers on the GPUs of all others. Usage: sbatch --nodes=3 scripts/slurm_ray.sh --rollout.on ray TRAIN_OPTIONS
# Adapt the #SBATCH lines to your cluster. Ray's ports run any code that a stranger sends: only use it where nodes are yours alone.
#SBATCH --job-name=sage-ray
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
set -euo pipefail
export RAY_USAGE_STATS_ENABLED=0
port=$((20000 + SLURM_JOB_ID % 10000))
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')

# The head's GPU belongs to the trainer: Ray is told of none.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address "$address" --port "$port" --num-gpus 0 --include-dashboard false --block &
sleep 20
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" ray start --address "$address:$port" --num-gpus 8 --block &
done
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    sage-grpo train "$@" --rollout.ray.address "$address:$port"
