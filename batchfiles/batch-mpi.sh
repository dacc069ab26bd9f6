#!/bin/bash -l
# MPI: a process for each GPU, on as many nodes as sbatch is told.
#     sbatch --nodes=2 --gpus-per-node=4 batchfiles/batch-mpi.sh
#SBATCH --job-name=mpi
#SBATCH --nodes=1
#SBATCH --gpus-per-node=2
#SBATCH --ntasks-per-node=1     # srun starts one for each GPU, below
#SBATCH --cpus-per-gpu=8
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

: "${WORKSHOP:?is not set: source activate.sh, then sbatch --export=ALL}"
source "$WORKSHOP/batchfiles/job.sh" || exit 1

train srun --kill-on-bad-exit=1 --ntasks-per-node="$processes" \
    --cpus-per-task="$cores" python \
    "$(stage mpi)" --run-dir "$run" --resume "$@"
