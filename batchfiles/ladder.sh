#!/bin/bash
# Submits a stage from one GPU to eight, 100 steps each, to see it scale:
#
#     batchfiles/ladder.sh ddp|lit [flags of the script]
#
# `python -m workshop plot` draws what came of it.
set -euo pipefail
stage=${1-}
case $stage in
ddp | lit) shift ;;
*)
    echo "which stage? $0 ddp|lit [flags of the script]" >&2
    exit 1
    ;;
esac

for size in 1n1g 1n2g 1n4g 2n1g 2n2g 2n4g; do
    sbatch "$(dirname "$(realpath "$0")")/batch-$stage-$size.sh" \
        --max-steps 100 --eval-every 100 "$@"
done
