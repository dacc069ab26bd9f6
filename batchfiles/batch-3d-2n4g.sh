#!/bin/bash -l
# 3D parallelism on 2 nodes with 4 GPUs each: 8 processes.
#SBATCH --job-name=3d-2n4g
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=1     # a torchrun on each node, which starts 4
#SBATCH --cpus-per-task=32      # for each torchrun: 8 a GPU
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

source "$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's|^ *Command=\(.*/batchfiles\)/.*|\1|p')/job.sh" || exit 1

train srun --kill-on-bad-exit=1 "$batchfiles/torchrun.sh" \
    "$(stage 3d)" --run "$run" --resume \
    --pipeline-parallel 2 --tensor-parallel 2 "$@"
