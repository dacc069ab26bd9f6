#!/bin/bash
# For the instructor: submits a stage on one GPU up to eight (the sizes it has
# a batch file for), 100 steps each, to see it scale:
#
#     batchfiles/all-sizes.sh STAGE [flags of the script]
#
# Each job leaves a checkpoint. `python -m workshop plot` draws the results.
set -euo pipefail
folder=$(dirname "$(realpath "$0")")
stage=${1-}
if [ ! -f "$folder/batch-$stage-1n4g.sh" ]; then
    stages=$(cd "$folder" && echo batch-*-1n4g.sh)
    stages=${stages//batch-/}
    echo "name a stage: $0 STAGE [flags], one of: ${stages//-1n4g.sh/}" >&2
    exit 1
fi
shift

for size in 1n1g 1n2g 1n4g 2n1g 2n2g 2n4g; do
    file=$folder/batch-$stage-$size.sh
    if [ -f "$file" ]; then
        sbatch "$file" --max-steps 100 --eval-every 100 "$@"
    fi
done
