#!/bin/bash -l
# DDP on 1 node with 1 GPU: 1 process.
#SBATCH --job-name=ddp-1n1g
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1     # a torchrun, which starts 1
#SBATCH --cpus-per-gpu=8
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

: "${WORKSHOP:?is not set; fix: source activate.sh, then sbatch --export=ALL}"
. "$WORKSHOP/batchfiles/job.sh" || exit 1

train srun --kill-on-bad-exit=1 "$WORKSHOP/batchfiles/torchrun.sh" \
    "$(stage ddp)" --run-dir "$run" --resume "$@"
