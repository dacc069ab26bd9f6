#!/bin/bash -l
# A stage, on what qsub asks for: `launch` starts as many processes on each
# node as the job's mpiprocs, one for each GPU.
#     qsub -v STAGE=ddp,FLAGS="--max-steps 100" \
#         -l select=2:ncpus=32:ngpus=4:mpiprocs=4 batchfiles/pbs/batch-stage.sh
#PBS -N stage
#PBS -l select=1:ncpus=32:ngpus=4:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe
#PBS -r n

: "${PBS_O_WORKDIR:?is not set; fix: submit this file with qsub}"
: "${STAGE:?is not set; fix: name a stage, as in qsub -v STAGE=ddp}"
source "$PBS_O_WORKDIR/batchfiles/pbs/job.sh" || exit 1

train python -m workshop launch "$STAGE" -- --run-dir "$run" --resume "${flags[@]}"
