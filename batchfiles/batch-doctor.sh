#!/bin/bash -l
# Do the devices of these nodes reach each other, and how fast? Asks all ranks.
#SBATCH --job-name=doctor
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4     # srun starts 4 processes on each node
#SBATCH --cpus-per-gpu=8
#SBATCH --time=00:10:00

: "${WORKSHOP:?is not set; fix: source activate.sh, then sbatch --export=ALL}"
. "$WORKSHOP/batchfiles/job.sh" || exit 1

srun --kill-on-bad-exit=1 --ntasks-per-node="$processes" \
    --cpus-per-task="$cores" python -m workshop doctor --ranks
