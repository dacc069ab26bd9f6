# What the batch files share: a job's environment, and how the job goes on
# after its time limit. They source this file, so `exit` ends the job. WORKSHOP
# is the course's folder: activate.sh sets it, and sbatch passes it on.
# shellcheck shell=bash disable=SC2034 # they use the variables

fail() {
    trap - EXIT
    echo "$SLURM_JOB_NAME: $*" >&2
    exit 1
}

# Ask again where SLURM is too busy to answer.
ask_slurm() {
    "$@" || { sleep 10 && "$@"; } || { sleep 30 && "$@"; }
}

# Requeue the job if its run has saved a further step, or if an urgent job
# takes its nodes. Else it fails, and the arguments say why.
end_job() {
    local said file again
    said=$(ask_slurm scontrol -o show job "$job")
    if [[ $said && $said != *" Restarts=${SLURM_RESTART_COUNT-0} "* ]]; then
        fail "SLURM requeues this job"
    elif [[ $said =~ JobState=([^ ]+)\ (Reason=[^ ]+) &&
        ${BASH_REMATCH[1]} != RUNNING ]]; then
        fail "SLURM ends this job (${BASH_REMATCH[2]}):" \
            "python -m workshop why ${run@Q}"
    elif [[ $after = "$before" &&
        $said != *Requeue=1*PreemptTime=[0-9]* ]]; then
        fail "$@"
    fi
    if [[ $said != *" Requeue=0 "* ]]; then
        echo "$SLURM_JOB_NAME: requeueing, to go on after ${after:-its} steps"
        ask_slurm scontrol requeue "$job" && trap - EXIT && exit 0
    fi
    [[ $said =~ Command=(.*)\ WorkDir= ]] # with the script's flags
    file=${BASH_REMATCH[1]%" ${flags[*]}"}
    [ -f "$file" ] || { file=$run/batch-$job.sh && cp "$0" "$file"; } # piped
    printf -v again ' %q' --nodes="$SLURM_NNODES" --gpus-per-node="$gpus" \
        --ntasks-per-node="$tasks" "$file" "${flags[@]}"
    fail "not requeued; go on with: WORKSHOP_RUN=${run@Q} sbatch$again"
}
flags=("$@") job=$SLURM_JOB_ID element='' most_cores=${SLURM_CPUS_PER_GPU-}

# SLURM sends USR1 before the time limit, too early for a very short job, and
# TERM if the job is cancelled or loses its nodes.
trap 'end_job "no time is left to train: give a longer --time"' USR1 TERM

# In an array SLURM_JOB_ID may mean all of it. Inside an array's job sbatch
# passes the array's variables on to another job.
if [ "${SLURM_ARRAY_TASK_ID-}" ] &&
    [[ $(ask_slurm scontrol -o show job "$job") =~ ^$|ArrayTaskId ]]; then
    element=_$SLURM_ARRAY_TASK_ID
    job=$SLURM_ARRAY_JOB_ID$element
fi

# A job that was submitted from inside another, for example from a portal's
# JupyterLab, inherits the variables of the other, and srun would read them as
# options. SLURM has set the ones we keep for this job.
for name in ${!SLURM_*}; do
    case $name in
    SLURM_CONF | SLURM_JOB_* | SLURM_NNODES | SLURM_RESTART_COUNT) ;;
    SLURM_NTASKS_PER_NODE | SLURM_CPUS_PER_TASK) ;;
    *) unset "$name" ;;
    esac
done

run=${WORKSHOP_RUN:-$WORKSHOP/runs/$SLURM_JOB_NAME-${job%_*}}$element
run=$(realpath -ms "$run") # for commands that are typed in another folder
[[ " ${flags[*]}" != *" --run-dir"* ]] || # which signals would not reach
    fail "instead of --run-dir give sbatch the run's folder: WORKSHOP_RUN=DIR"

# Load the site's modules and the environment. Jobs install nothing.
trap 'fail "site.sh calls exit, which ends the job: use return"' EXIT
WORKSHOP_INSTALL=no source "$WORKSHOP/activate.sh" >/dev/null && active=yes
trap - EXIT
[ "${active-}" ] || exit 1
[ -d "${WORKSHOP_DATA:-/}" ] ||
    fail "WORKSHOP_DATA is $WORKSHOP_DATA, which does not exist: fix site.sh"

# The processes meet on the first node, at a port of this job's own.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# Each node unpacks the environment if WORKSHOP_VENV is an archive, and says
# how many GPUs and cores SLURM gave it, in whatever way they were asked for.
# shellcheck disable=SC2016 # the nodes' own variables
mapfile -t given < <(srun --mpi=none bash -c '((SLURM_LOCALID)) && exit
    [ -z "$2" ] || bash "$1/setup.sh" unpack "$2" >/dev/null &&
    echo "${SLURM_GPUS_ON_NODE:-0} $SLURM_CPUS_ON_NODE"
' - "$WORKSHOP" "$(sed -n 's/^archive=//p' "${VIRTUAL_ENV-}/workshop-base" \
    2>/dev/null)" | sort -nk1,1 -k2)
((${#given[@]} == SLURM_NNODES)) || exit 1 # srun or a node has said why
read -r gpus cores <<<"${given[0]}"        # the least
[ "${given[-1]% *}" = "$gpus" ] || fail "one node has ${given[-1]% *} GPUs," \
    "another $gpus: ask for as many on each, with --gpus-per-node"

# A process for each GPU, or without GPUs for each task, of one thread for each
# core. srun starts one thing on each node, such as torchrun, if it is told
# nothing else; since 22.05 it has to be told the cores.
tasks=${SLURM_NTASKS_PER_NODE:-1} processes=$gpus
((gpus)) || processes=$tasks
((tasks == 1 || tasks == processes)) || fail "$gpus GPUs and $tasks tasks on" \
    "each node: each GPU has a process, so give sbatch --ntasks-per-node=$gpus"
((cores /= processes)) || fail "there are fewer cores than processes," \
    "$processes on each node: give sbatch --cpus-per-gpu=8"
((!gpus || !most_cores || cores < most_cores)) || cores=$most_cores
((!gpus)) || export SLURM_GPUS_PER_NODE=$gpus
export processes SLURM_NTASKS_PER_NODE=1 OMP_NUM_THREADS=$cores
export SRUN_CPUS_PER_TASK=$((processes * cores))

# What `python -m workshop why` reads if the job hangs or dies: with its hook in
# PYTHONPATH each rank writes there. PyTorch's record keeps 2,000 collectives.
RANKCHECK_WHY=$run/why/$job-${SLURM_RESTART_COUNT-0}
# An empty entry of it would be the working directory
PYTHONPATH=$WORKSHOP/rankcheck/why/hook${PYTHONPATH:+:$PYTHONPATH}
export RANKCHECK_WHY PYTHONPATH
export TORCH_FR_BUFFER_SIZE=2000 NCCL_DEBUG=${NCCL_DEBUG-WARN}

# The script of a stage: yours where it passed the check for that stage, else
# the solution. The log says which, and why.
stage() { python -m workshop script "$1"; }

# Say what runs where, and run a command that trains in $run. If it ends before
# the last step, for whatever reason, but has saved a further step, the job is
# requeued, and its next start goes on from the last checkpoint.
train() {
    local running asked='' earlier
    trap 'asked=yes; echo "$SLURM_JOB_NAME: no time is left: saving"' USR1
    before=$(python -m workshop progress "$run")
    before=${before%% *} earlier=$(begun)
    echo "job       $SLURM_JOB_NAME $job: $SLURM_NNODES x $gpus GPUs, on" \
        "$SLURM_JOB_NODELIST"
    echo "data      ${WORKSHOP_DATA:-no WORKSHOP_DATA}, unless --data is given"
    echo "command  $(printf ' %q' "$@")"
    watch_gpus
    trap : TERM # the processes get it as well
    "$@" &
    running=$!
    while kill -0 $running 2>/dev/null; do
        sleep 1
        [[ $asked && $(begun) != @("$earlier"|) ]] &&
            kill -USR1 $running && asked='' # srun passes it on to all of them
    done

    after=$(python -m workshop progress "$run") && exit 0
    after=${after%% *}
    [[ $(begun) != "$earlier" ]] || after=$before # else another job's steps
    end_job "stopped and not requeued: no further step was saved, see above:" \
        "python -m workshop why ${run@Q}"
}

# What the run's record says as soon as it trains, different for each start. A
# signal has to wait for it: Python would die of it before.
begun() { grep -s '"startup": [0-9]' "$run/hyperparameters.json"; }

# Every ten seconds, record in the run's folder what each node's GPUs do.
watch_gpus() {
    local command
    if command -v nvidia-smi >/dev/null; then
        command=(nvidia-smi dmon -s pucm -o DT -d 10)
    elif command -v xpu-smi >/dev/null; then
        command=(xpu-smi dump -d -1 -m "0,1,2,18" -i 10)
    else
        return
    fi
    mkdir -p "$run"
    # it shares the processes' resources, and ends with the job
    srun --overlap --mpi=none --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --open-mode=append --output="$run/gpus-%N.txt" "${command[@]}" \
        2>/dev/null & # srun would say that it was ended
}
