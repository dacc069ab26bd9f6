#!/bin/bash -l
# 3D parallelism on 2 nodes with 4 GPUs each: 8 processes.
#PBS -N 3d-2n4g
#PBS -l select=2:ncpus=32:ngpus=4:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe
#PBS -r n

source "$PBS_O_WORKDIR/batchfiles/pbs/job.sh" || exit 1

export OMP_NUM_THREADS=8
train mpiexec -n 8 "${per_node[@]}" 4 \
    python -m workshop.as_torchrun "$(stage 3d)" \
    --run "$run" --resume \
    --pipeline-parallel 2 --tensor-parallel 2 "${flags[@]}"
