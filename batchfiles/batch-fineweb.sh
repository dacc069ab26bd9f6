#!/bin/bash -l
# Builds the FineWeb-Edu dataset on the cores of a node: see fineweb/README.md.
#SBATCH --job-name=fineweb
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00         # if that is too short, submit it again
#SBATCH --requeue --open-mode=append

: "${WORKSHOP:?is not set; fix: source activate.sh, then sbatch --export=ALL}"
. "$WORKSHOP/batchfiles/job.sh" || exit 1

srun python "$WORKSHOP/fineweb/fineweb.py" "$@"
