#!/usr/bin/env bash
# Does what an attendee does in an hour, in a fresh clone, with this clone's
# site.sh and the environment that is active, and says how long each step takes:
#     bash docs/rehearse.sh [flags of the job's script, --max-steps 100]
# The clone lies in a new folder here, and is kept if a step fails.
set -euo pipefail -m # each step is ended with all that it has started
course=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export WORKSHOP_VENV="${VIRTUAL_ENV:?source activate.sh first}"
unset WORKSHOP_INSTALL PYTHONPATH
flags=${*:---max-steps 100} folder=$(mktemp -d "$PWD/.rehearsal-XXXXXX")
trap 'kill %1; wait; rm -rf "$folder"; exit 1' INT TERM HUP
trust=(-c 'safe.directory=*') # another user's clone: we run its code already
git "${trust[@]}" clone -q --upload-pack "git ${trust[*]@Q} upload-pack" \
    "$course" "$folder/gpt2-workshop"
cd "$folder/gpt2-workshop"
[ ! -e "$course/site.sh" ] || cp "$course/site.sh" .
job="python -m workshop launch ddp -- $flags"
! command -v qsub >/dev/null || job="qsub -W block=true -v WORKSHOP_VENV=$(
    )$WORKSHOP_VENV,STAGE=ddp,FLAGS='$flags' batchfiles/pbs/batch-stage.sh"
! command -v sbatch >/dev/null ||
    job="sbatch --wait batchfiles/batch-ddp-1n2g.sh $flags"
execute="jupyter nbconvert --log-level=ERROR --execute --to=notebook"
while read -r name seconds command; do # seconds: what the plan leaves
    begin=$SECONDS
    bash -c "source activate.sh && $command" </dev/null &>"$folder/$name.log" &
    # nbconvert has succeeded, too, if a cell complains
    if ! wait $! || grep -sh -A 2 x-workshop-complaint notebooks/done.*; then
        tail -n 3 "$folder/$name.log" && echo "$name failed: $folder" && exit 1
    fi >&2
    printf '%-9s %4d s of %3d\n' "$name" $((SECONDS - begin)) "$seconds"
done <<<"activate 120 true
doctor 60 python -m workshop doctor
start 120 $execute --output done.start notebooks/start_here.ipynb
diff 10 python -m workshop diff ddp
reset 10 python -m workshop reset ddp
check 120 python -m workshop check ddp
job 300 $job
results 60 $execute --output done.results notebooks/results.ipynb"
rm -rf "$folder"
