#!/bin/bash -l
# FSDP: a process for each GPU, on as many nodes as sbatch is told.
#     sbatch --nodes=2 --gpus-per-node=4 batchfiles/batch-fsdp.sh
#SBATCH --job-name=fsdp
#SBATCH --nodes=1
#SBATCH --gpus-per-node=2
#SBATCH --ntasks-per-node=1     # a torchrun, which starts the others
#SBATCH --cpus-per-gpu=8
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

: "${WORKSHOP:?is not set; fix: source activate.sh, then sbatch --export=ALL}"
. "$WORKSHOP/batchfiles/job.sh" || exit 1

train srun --kill-on-bad-exit=1 "$WORKSHOP/batchfiles/torchrun.sh" \
    "$(stage fsdp)" --run-dir "$run" --resume "$@"
