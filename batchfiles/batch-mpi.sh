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

: "${WORKSHOP:?is not set; fix: source activate.sh, then sbatch --export=ALL}"
. "$WORKSHOP/batchfiles/job.sh" || exit 1

start=(srun --kill-on-bad-exit=1 --ntasks-per-node="$processes"
    --cpus-per-task="$cores")
# If site.sh does not choose srun's plugin for MPI, and srun's own choice does
# not work, mpirun starts the ranks. It reads older names of a job's variables.
if [ -z "${SLURM_MPI_TYPE-}" ] && ((processes * SLURM_NNODES > 1)) &&
    type -P mpirun >/dev/null && ! RANKCHECK_WHY='' "${start[@]}" python -c \
    'from backstage import mpi; mpi.join_mpi()' 2>/dev/null; then
    echo "by mpirun: srun does not pass the ranks to MPI (srun --mpi=list)"
    export SLURM_JOBID=$SLURM_JOB_ID SLURM_NODELIST=$SLURM_JOB_NODELIST
    export SLURM_TASKS_PER_NODE="$processes(x$SLURM_NNODES)"
    export {OMPI_MCA_hwloc_base,PRTE_MCA_hwloc_default}_binding_policy=none
    start=(mpirun -n $((processes * SLURM_NNODES)))
fi

train "${start[@]}" python \
    "$(stage mpi)" --run-dir "$run" --resume "$@"
