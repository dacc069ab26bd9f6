#!/usr/bin/env bash
# Does what an attendee does in a session, in a new clone in this folder, with
# this site.sh and environment, and says how long it takes. A failed clone is kept.
#     bash docs/rehearse.sh [MINUTES of the session, 60] [flags of the jobs'
#         scripts, --max-steps 100]
set -euo pipefail -m # each step is ended with all that it has started
minutes=60
if [[ ${1-} =~ ^[0-9]+$ ]]; then minutes=$1 && shift; fi
case $minutes in 60 | 90 | 120 | 240) ;; *)
    echo "error: a session has 60, 90, 120 or 240 minutes, not $minutes" >&2
    exit 2 ;;
esac
course=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export WORKSHOP_VENV="${VIRTUAL_ENV:?is not set; fix: source activate.sh}"
unset WORKSHOP_INSTALL PYTHONPATH
flags=${*:---max-steps 100} folder=$(mktemp -d "$PWD/.rehearsal-XXXXXX")
trap 'kill %1; wait; rm -rf "$folder"; exit 1' INT TERM HUP
# another user's clone: we run its code already
git -c 'safe.directory=*' clone -q \
    --upload-pack "git -c 'safe.directory=*' upload-pack" \
    "$course" "$folder/gpt2-workshop"
cd "$folder/gpt2-workshop" && tool="python -m workshop"
[ ! -e "$course/site.sh" ] || cp "$course/site.sh" .
# SLURM, or where there is none, one on this machine, if it has what that needs
cluster() { (
    cd "$course"
    "$VIRTUAL_ENV/bin/python" -m workshop cluster "$1" "--name=rehearsal-$$"
) 2>/dev/null; }
sbatch=''
! timeout 30 sinfo -h &>/dev/null || sbatch=sbatch
if [ -z "$sbatch" ] && ! command -v qsub >/dev/null && lines=$(cluster up); then
    trap 'cluster down' EXIT
    eval "$lines"
    sbatch="env -u SBATCH_PARTITION -u SBATCH_RESERVATION"  # a site's
    sbatch+=" -u SBATCH_CONSTRAINT sbatch"
    echo "the jobs run on a SLURM on this machine: docs/cluster.md" >&2
fi
stage() { # make it by its changes, check it, submit what has passed
    local run="$tool launch $1 -- $flags"
    ! command -v qsub >/dev/null || run="qsub -W block=true -v WORKSHOP_VENV=$(
        )$WORKSHOP_VENV,STAGE=$1,FLAGS='$flags' batchfiles/pbs/batch-stage.sh"
    [ -z "$sbatch" ] ||
        run="$sbatch --wait batchfiles/batch-$1-1n2g.sh $flags"
    echo "$1 150 $tool apply $1 --all && $tool check $1
$1-job 300 $tool script $1 | grep /code/ && $run"
}
execute="jupyter nbconvert --log-level=ERROR --execute --to=notebook"
lesson() { echo "$1 $2 $execute --output done.$1 notebooks/$1.ipynb"; }
more='' extra=''
((minutes < 120)) || more=$(lesson collectives 180)
((minutes < 240)) || extra=$(lesson your_model 600 && lesson hangs 600)
while read -r name seconds command; do # seconds: what the plan leaves
    [ -n "$name" ] || continue # this session has no such lesson
    begin=$SECONDS
    bash -c "source activate.sh && $command" </dev/null &>"$folder/$name.log" &
    # nbconvert has succeeded, too, if a cell complains
    if ! wait $! || grep -sh -A 2 x-workshop-complaint notebooks/done.*; then
        tail -n 3 "$folder/$name.log" && echo "$name failed: $folder" && exit 1
    fi >&2
    printf '%-11s %4d s of %3d\n' "$name" $((SECONDS - begin)) "$seconds"
done <<<"activate 120 true
doctor 60 $tool doctor
start 120 $execute --output done.start notebooks/start_here.ipynb
$more
$(stage ddp)
$(stage lit)
$extra
results 60 $execute --output done.results notebooks/results.ipynb"
rm -rf "$folder"
