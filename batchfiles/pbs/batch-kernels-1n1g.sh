#!/bin/bash -l
# Kernels on 1 node with 1 GPU.
#PBS -N kernels-1n1g
#PBS -l select=1:ncpus=8:ngpus=1:mpiprocs=1
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe
#PBS -r n

source "$PBS_O_WORKDIR/batchfiles/pbs/job.sh" || exit 1

export OMP_NUM_THREADS=8
train python "$(stage kernels)" \
    --run "$run" --resume "${flags[@]}"
