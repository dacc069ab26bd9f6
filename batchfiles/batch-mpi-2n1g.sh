#!/bin/bash -l
# MPI on 2 nodes with 1 GPU each: 2 processes.
#SBATCH --job-name=mpi-2n1g
#SBATCH --nodes=2
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1     # srun starts 1 process on each node
#SBATCH --cpus-per-task=8       # for each process
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

source "$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's|^ *Command=\(.*/batchfiles\)/.*|\1|p')/job.sh" || exit 1

train srun --kill-on-bad-exit=1 python \
    "$(stage mpi)" --run "$run" --resume "$@"
