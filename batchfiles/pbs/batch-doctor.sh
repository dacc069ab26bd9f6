#!/bin/bash -l
# Do the devices of these nodes reach each other, and how fast? Asks all ranks.
#PBS -N doctor
#PBS -l select=2:ncpus=32:ngpus=4:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=00:10:00
#PBS -j oe
#PBS -k doe
#PBS -r n

: "${PBS_O_WORKDIR:?is not set; fix: submit this file with qsub}"
source "$PBS_O_WORKDIR/batchfiles/pbs/job.sh" || exit 1

python -m workshop launch doctor
