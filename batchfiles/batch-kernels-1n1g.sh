#!/bin/bash -l
# Kernels on 1 node with 1 GPU.
#SBATCH --job-name=kernels-1n1g
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1     # srun starts one process
#SBATCH --cpus-per-task=8       # for each process
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

source "$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's|^ *Command=\(.*/batchfiles\)/.*|\1|p')/job.sh" || exit 1

train srun --kill-on-bad-exit=1 python \
    "$(stage kernels)" --run "$run" --resume "$@"
