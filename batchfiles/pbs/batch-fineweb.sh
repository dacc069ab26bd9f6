#!/bin/bash -l
# Builds the FineWeb-Edu dataset on the cores of a node: see fineweb/README.md.
# If the time is too short, submit it again.
#PBS -N fineweb
#PBS -l select=1:ncpus=32
#PBS -l walltime=04:00:00
#PBS -j oe
#PBS -k doe
#PBS -r n

: "${PBS_O_WORKDIR:?is not set; fix: submit this file with qsub}"
source "$PBS_O_WORKDIR/batchfiles/pbs/job.sh" || exit 1

python "$root/fineweb/fineweb.py" "${flags[@]}"
