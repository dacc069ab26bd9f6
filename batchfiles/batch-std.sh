#!/bin/bash -l
# The single-device stage: one process, on one GPU.
#     sbatch batchfiles/batch-std.sh --max-steps 100
#SBATCH --job-name=std
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1     # srun starts one process
#SBATCH --cpus-per-gpu=8
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

: "${WORKSHOP:?is not set; fix: source activate.sh, then sbatch --export=ALL}"
. "$WORKSHOP/batchfiles/job.sh" || exit 1
((gpus < 2)) || echo "warning: one process trains, on one of $gpus GPUs" >&2

train srun --kill-on-bad-exit=1 python \
    "$(stage std)" --run-dir "$run" --resume "$@"
