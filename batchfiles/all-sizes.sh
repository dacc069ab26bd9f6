#!/bin/bash
# For the instructor: submits a stage that trains on any number of GPUs, on one
# up to eight, 100 steps each, to see it scale:
#
#     batchfiles/all-sizes.sh STAGE [flags of the script]
#
# Each job leaves a checkpoint. `python -m workshop plot` draws the results.
set -euo pipefail
folder=$(dirname "$(realpath "$0")")
stage=${1-}
if [ ! -f "$folder/batch-$stage.sh" ] &&
    [ ! -f "$folder/batch-$stage-1n1g.sh" ]; then
    echo "error: no such stage; fix: name one, for example: $0 ddp [flags]" >&2
    exit 1
fi
shift

for size in 1n1g 1n2g 1n4g 2n1g 2n2g 2n4g; do
    file=$folder/batch-$stage-$size.sh
    [ -f "$file" ] || file=$folder/batch-$stage.sh
    sbatch --nodes="${size:0:1}" --gpus-per-node="${size:2:1}" "$file" \
        --max-steps 100 --eval-every 100 "$@"
done
