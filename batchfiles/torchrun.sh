#!/bin/bash
# Starts this node's processes, one for each GPU. srun runs this file once on
# each node, and numbers the nodes in the order of its list. torchrun numbers
# the processes in that order, so that the first ones are on the first node,
# and sets RANK, LOCAL_RANK and WORLD_SIZE. PET_TEE=3 in sbatch's environment
# marks the lines of each rank (docs/launching.md).

# The signal before the time limit is meant for the processes. torchrun itself
# would die of it and leave them behind.
trap '' USR1

exec torchrun \
    --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-$processes}" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    "$@"
