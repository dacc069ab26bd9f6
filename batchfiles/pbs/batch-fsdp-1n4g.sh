#!/bin/bash -l
# FSDP on 1 node with 4 GPUs: 4 processes.
#PBS -N fsdp-1n4g
#PBS -l select=1:ncpus=32:ngpus=4:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe
#PBS -r n

source "$PBS_O_WORKDIR/batchfiles/pbs/job.sh" || exit 1

export OMP_NUM_THREADS=8
train mpiexec -n 4 "${per_node[@]}" 4 \
    python -m workshop.as_torchrun "$(stage fsdp)" \
    --run "$run" --resume "${flags[@]}"
