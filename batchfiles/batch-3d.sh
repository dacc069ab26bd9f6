#!/bin/bash -l
# 3D parallelism: two pipeline stages, in which two GPUs share each matrix.
#     sbatch --nodes=4 --gpus-per-node=4 batchfiles/batch-3d.sh
#SBATCH --job-name=3d
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=1     # a torchrun, which starts the others
#SBATCH --cpus-per-gpu=8
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

: "${WORKSHOP:?is not set; fix: source activate.sh, then sbatch --export=ALL}"
. "$WORKSHOP/batchfiles/job.sh" || exit 1

train srun --kill-on-bad-exit=1 "$WORKSHOP/batchfiles/torchrun.sh" \
    "$(stage 3d)" --run-dir "$run" --resume \
    --pipeline-parallel 2 --tensor-parallel 2 "$@"
