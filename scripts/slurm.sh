#!/bin/bash
# A multi-node run under Slurm: one torchrun per node, one process per GPU.
#   sbatch --nodes=8 scripts/slurm.sh --config run.yaml --out /shared/runs/sage
# The output folder must be visible from all nodes. Ten minutes before the time limit all ranks are told to leave: they finish their
# iteration and save, and the job queues itself again to go on from there.
#SBATCH --job-name=sage-grpo
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -u

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
leaving=0
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540 # torchrun gives its workers 30 seconds otherwise

leave() {
    leaving=1
    scancel --signal=TERM "$SLURM_JOB_ID.0" # the first step, below; torchrun hands it on to its workers
}
trap leave TERM

srun torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend=c10d --rdzv-endpoint="$first:29500" --rdzv-id="$SLURM_JOB_ID" \
    --max-restarts=3 \
    -m sage_grpo train "$@" &
running=$!
wait "$running" # returns early when the signal comes
status=$?
while kill -0 "$running" 2>/dev/null; do
    wait "$running"
    status=$?
done
if [ "$leaving" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
