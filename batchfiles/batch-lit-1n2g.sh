#!/bin/bash -l
# Lightning on 1 node with 2 GPUs: 2 processes.
#SBATCH --job-name=lit-1n2g
#SBATCH --nodes=1
#SBATCH --gpus-per-node=2
#SBATCH --ntasks-per-node=2     # srun starts 2 processes
#SBATCH --cpus-per-gpu=8
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

: "${WORKSHOP:?is not set; fix: source activate.sh, then sbatch --export=ALL}"
. "$WORKSHOP/batchfiles/job.sh" || exit 1

train srun --kill-on-bad-exit=1 --ntasks-per-node="$processes" \
    --cpus-per-task="$cores" python \
    "$(stage lit)" --run-dir "$run" --resume "$@"
