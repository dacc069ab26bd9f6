# What the batch files for PBS share: a job's environment, and how the job goes
# on after its time limit. They source this file, so `exit` ends the job. What
# has to be set before site.sh was read begins with _job: a profile and site.sh
# have variables, functions and aliases of their own.
# shellcheck shell=bash disable=SC2034 # they use the variables

# A profile may have changed what the lines below mean.
set +o posix
shopt -u nocasematch
unalias -a
IFS=$' \t\n'

_job_stage=${STAGE-} _job_text=${FLAGS-} _job_run=${WORKSHOP_RUN-}
_job_file=$(realpath "${BASH_SOURCE[0]}") _job_active=''

# Load the site's modules and the environment. Jobs install nothing.
trap 'echo "$PBS_JOBNAME: site.sh calls exit, which ends the job;" \
        "fix: use return" >&2
    exit 1' EXIT
WORKSHOP_INSTALL=no source "${_job_file%/*/*/*}/activate.sh" >/dev/null &&
    _job_active=yes
trap - EXIT
[ "$_job_active" ] || exit 1

# What site.sh may have changed.
set +o posix
shopt -u nocasematch
unalias -a
IFS=$' \t\n'

fail() {
    echo "$PBS_JOBNAME: $*" >&2
    exit 1
}

batchfiles=${_job_file%/*}
root=${batchfiles%/*/*}
STAGE=$_job_stage
run=${_job_run:-$root/runs/$STAGE-${PBS_JOBID%%.*}}
read -ra flags <<<"$_job_text" # of the script: qsub -v FLAGS="--max-steps 100"
[[ " ${flags[*]}" != *" --run-dir"* ]] || # which signals would not reach
    fail "a job does not take --run-dir; fix: name the run's folder to" \
        "qsub: -v WORKSHOP_RUN=DIR"
if [ -n "${WORKSHOP_DATA-}" ] && [ ! -d "$WORKSHOP_DATA" ]; then
    fail "WORKSHOP_DATA is $WORKSHOP_DATA, which does not exist; fix:" \
        "correct it in site.sh"
fi

[ "${PBS_ENVIRONMENT-}" != PBS_INTERACTIVE ] || # qsub -I
    fail "this shell is in another job, $PBS_JOBID; fix: run it here with:" \
        "python -m workshop launch ${STAGE:-doctor} ${FLAGS:+-- $FLAGS}"

# The processes meet on the first node, at a port of this job's own. The node
# file is on that node alone.
[ -s "${PBS_NODEFILE-}" ] ||
    fail "PBS_NODEFILE names no file with nodes; fix: submit this with qsub"
while read -r node; do
    getent ahosts "$node" >/dev/null ||
        fail "$PBS_NODEFILE names $node, which $HOSTNAME cannot resolve"
done < <(sort -u "$PBS_NODEFILE")
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
MASTER_PORT=$((20000 + ${PBS_JOBID//[!0-9]*/} % 10000))
export MASTER_ADDR MASTER_PORT

# What `python -m workshop why` reads if the job hangs or dies: with its hook in
# PYTHONPATH each rank writes there. PyTorch's record keeps 2,000 collectives.
RANKCHECK_WHY=$run/why/${PBS_JOBID%%.*}
# An empty entry of it would be the working directory
PYTHONPATH=$root/rankcheck/src/rankcheck/system/hook${PYTHONPATH:+:$PYTHONPATH}
export RANKCHECK_WHY PYTHONPATH
export TORCH_FR_BUFFER_SIZE=2000 NCCL_DEBUG=${NCCL_DEBUG-WARN}

# Run a command that trains in $run. PBS ends a job at its time limit and gives
# it a few seconds; two minutes before we ask the run to save and end. If it
# has saved a further step but not the last one, a new job goes on from there.
train() {
    local - job before after processes status end earlier
    local options again advice ended='' finished=''
    set +eu
    # qstat breaks long lines, and begins what is left of them with a tab
    job=$(qstat -f "$PBS_JOBID" 2>/dev/null | sed ':a;N;$!ba;s/\n\t//g')
    before=$(progress)
    echo "job       $PBS_JOBNAME $PBS_JOBID, on" \
        "$(sort -u "$PBS_NODEFILE" | paste -sd ' ')"
    echo "command  $(printf ' %q' "$@")"
    earlier=$(begun)
    trap ended=yes TERM # by qdel or PBS: the processes get it as well
    "$@" &
    processes=$!
    end=$(when_to_end)
    while kill -0 $processes 2>/dev/null; do
        sleep 1
        if [ -n "$end" ] && ((SECONDS >= end)) &&
            [[ $(begun) != @("$earlier"|) ]]; then
            kill -USR1 $processes # mpiexec passes it on to all of them
            end=
        fi
    done

    wait $processes
    status=$?
    ! python -m workshop progress "$run" >/dev/null || finished=yes
    after=$(progress)
    if [[ $(begun) = "$earlier" ]]; then
        # nothing has trained: what is saved are another job's steps, and a
        # run that was finished before says nothing of a command that fails
        after=$before
        ((status == 0)) || finished=
    fi
    [ -z "$finished" ] || exit 0
    read_options
    again=(qsub "${options[@]}"
        -v "WORKSHOP_RUN=$run,STAGE=$STAGE,FLAGS=${flags[*]}"
        "$batchfiles/batch-stage.sh")
    advice="fix: continue after step $after with: cd ${root@Q} && ${again[*]@Q}"
    if [ -n "$ended" ]; then
        fail "ended by qdel, or by PBS at the time limit; $advice"
    fi
    if [ "$after" = "$before" ]; then
        fail "stopped and not continued: no further step was saved; fix:" \
            "find the cause above, or by python -m workshop why ${run@Q}"
    fi
    if ! cd "$root" || ! "${again[@]}"; then
        fail "$advice"
    fi
    echo "$PBS_JOBNAME: a new job continues after $after steps"
    exit 0
}

# Put into `options` what was typed for this job, such as a site's project,
# queue and limits. PBS keeps it without quotes: the script's flags, which may
# look like options, are taken out first.
read_options() {
    local arguments words word
    options=()
    arguments=$(sed -n 's/^ *Submit_arguments = //p' <<<"$job")
    read -ra words <<<"${arguments/"FLAGS=$_job_text"/}"
    while [ "${#words[@]}" -gt 0 ] && [[ ${words[0]} == -* ]]; do
        word=${words[0]}
        words=("${words[@]:1}")
        case $word in
        -[APqlNWpMmkr]) # the value is the next word
            options+=("$word" "${words[0]}")
            words=("${words[@]:1}")
            ;;
        -[vJoejSCcau]) words=("${words[@]:1}") ;;
        -[APqlNWpMmkr]* | -V) options+=("$word") ;;
        esac
    done
}

# What the run's record says as soon as it trains, different for each start. A
# signal has to wait for it: Python would die of it before.
begun() { grep -s '"startup": [0-9]' "$run/hyperparameters.json"; }

# The number of steps that are saved.
progress() {
    local saved
    saved=$(python -m workshop progress "$run")
    [[ ! $saved =~ ([0-9]+)" of "[0-9?]+" steps" ]] || echo "${BASH_REMATCH[1]}"
}

# When to ask the run to end, in seconds since this shell began, with the job:
# two minutes before the time limit, if PBS says it.
when_to_end() {
    local limit hours minutes seconds
    limit=$(sed -n 's/^ *Resource_List.walltime = //p' <<<"$job")
    IFS=: read -r hours minutes seconds <<<"$limit"
    if [ -n "$seconds" ]; then
        limit=$((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))
        echo $((limit > 240 ? limit - 120 : limit / 2))
    fi
}
