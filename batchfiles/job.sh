# What the batch files share: a job's environment, and how the job goes on
# after its time limit. They source this file, so `exit` ends the job. WORKSHOP
# is the course's folder: activate.sh sets it, and sbatch passes it on.
# They use $run, $gpus, $processes, $cores, `stage` and `train`, which are set
# after site.sh was read. What has to be set before it begins with _job: a
# profile and site.sh have variables, functions and aliases of their own.
# shellcheck shell=bash disable=SC2034 # the batch files use the variables

# `sh batch-std.sh` and `zsh batch-std.sh` come to this line, too.
if [ -z "${BASH_VERSION-}" ]; then
    echo "batch file: this shell is not a SLURM job; fix: use sbatch" >&2
    exit 1
fi

# A profile may have changed what the lines below mean.
set +o posix
shopt -u nocasematch
unalias -a
IFS=$' \t\n'

# `bash batch-std.sh`, on a login node, a laptop or inside another job, is no
# job of its own: say in one line how it becomes one, or trains here.
_job_refuse() {
    local file stage given=() flags='' advice='' or=''
    file=$(realpath -s "${BASH_SOURCE[-1]}")
    if type -P sbatch >/dev/null; then
        printf -v advice ' %q' "$file" "${@:2}"
        advice="submit it: sbatch$advice" or='; or '
    fi
    stage=$(grep -oE '\$\(stage [a-z0-9]+|workshop doctor' "$file" | head -n 1)
    if [ "$stage" ]; then
        # what the file itself gives to the script, such as a mesh
        read -rd '' -a given < <(grep -v '^#' "$file" |
            grep -oE -- '--[a-z]+-parallel [0-9]+')
        ! grep -qF '"$@"' "$file" || given+=("${@:2}")
        [ "${#given[@]}" = 0 ] || printf -v flags ' %q' -- "${given[@]}"
        stage=${stage##* }
        advice+="${or}run it here: python -m workshop launch $stage$flags"
    fi
    echo "${file##*/}: $1; fix: ${advice:-submit it where sbatch is}" >&2
    exit 1
}
if [ -z "${SLURM_JOB_ID-}" ]; then
    _job_refuse "this shell is not a SLURM job" "$@"
elif [ -t 0 ] || [ -t 1 ] || # somebody types: a portal's terminal, or salloc's
    [[ $(scontrol show job "$SLURM_JOB_ID" 2>/dev/null) == \
        *$'\n   Requeue='[01]' Restarts='*([0-9])' BatchFlag=0 '* ]]; then
    _job_refuse "this shell is inside another job, $SLURM_JOB_ID" "$@"
fi

_job_flags=("$@") _job_name=${SLURM_JOB_NAME//[\/[:cntrl:]]/_}
_job_name=${_job_name/#./_}  # a folder that is seen
_job_name=${_job_name:0:100} # and that a file system takes
_job_most_cores=${SLURM_CPUS_PER_GPU-} _job_export=${SLURM_EXPORT_ENV-}
_job_array=${SLURM_ARRAY_JOB_ID-} _job_element=${SLURM_ARRAY_TASK_ID-}
_job_run=${WORKSHOP_RUN-} _job_folder=$PWD _job_signal=''

# A job that was submitted from inside another, for example from a portal's
# JupyterLab, inherits the variables of the other, and srun would read them as
# options. SLURM has set the ones we keep for this job.
for _job_variable in ${!SLURM_*}; do
    case $_job_variable in
    SLURM_CONF | SLURM_JOB_* | SLURM_NNODES | SLURM_RESTART_COUNT) ;;
    SLURM_NTASKS_PER_NODE | SLURM_CPUS_PER_TASK) ;;
    *) unset "$_job_variable" ;;
    esac
done

# Load the site's modules and the environment. Jobs install nothing. A signal
# has to wait: end_job is defined below.
trap '_job_signal=yes' USR1 TERM
trap 'echo "$_job_name: site.sh calls exit, which ends the job;" \
        "fix: use return" >&2
    exit 1' EXIT
_job_active=''
WORKSHOP_INSTALL=no source "$WORKSHOP/activate.sh" >/dev/null &&
    _job_active=yes
trap - EXIT
[ "$_job_active" ] || exit 1

# What site.sh may have changed.
set +o posix
shopt -u nocasematch
unalias -a
IFS=$' \t\n'

fail() {
    trap - EXIT
    echo "$_job_name: $*" >&2
    exit 1
}

# Ask again where SLURM is too busy to answer.
ask_slurm() {
    "$@" || { sleep 10 && "$@"; } || { sleep 30 && "$@"; }
}

# Put what SLURM says of this job into $_job_said. The job's name is taken out:
# it is any text.
ask_about_job() {
    _job_said=$(SLURM_TIME_FORMAT=standard \
        ask_slurm scontrol show job "$_job_id")
    _job_said=${_job_said/"JobName=$SLURM_JOB_NAME"$'\n'/$'JobName=\n'}
}

# Print what SLURM has said of a field of this job. $1: the first field of its
# line, for some lines are text of the user's; $2: the field, if it is another.
field() {
    local line
    while read -r line; do
        if [[ $line == "$1="* && " $line " =~ " ${2-$1}="([^ ]*)" " ]]; then
            [[ ${BASH_REMATCH[1]} == @(\(null\)|None|N/A|Partition_Limit) ]] ||
                echo "${BASH_REMATCH[1]}"
            return
        fi
    done <<<"$_job_said"
}

# SLURM ends the processes of a job that it requeues, and this scontrol with
# them. That is no failure: asked once more, SLURM would requeue a job that its
# user has cancelled meanwhile.
requeue() (
    trap '' TERM
    exec scontrol requeue "$_job_id"
)

# The states of a job that runs: SLURM shows another while it delivers SIGCONT,
# with which a grace time begins, or changes the job's nodes.
_job_running='^(RUNNING|SIGNALING|RESIZING|CONFIGURING)$'

# Requeue the job if its run has saved a further step, or if an urgent job
# takes its nodes. Else it fails, and the arguments say why.
end_job() {
    local - restarts state reason
    set +eu
    ask_about_job
    restarts=$(field Requeue Restarts) state=$(field JobState)
    reason=$(field JobState Reason)
    if [ "${restarts:=${SLURM_RESTART_COUNT-0}}" != \
        "${SLURM_RESTART_COUNT-0}" ]; then
        fail "SLURM requeues this job"
    elif [[ ! ${state:=RUNNING} =~ $_job_running ]]; then
        fail "SLURM ends this job (Reason=${reason:-None}); fix:" \
            "python -m workshop why ${run@Q}"
    elif ((_job_after <= _job_before)) && ! is_preempted; then
        fail "$@"
    fi
    if [ "$(field Requeue)" != 0 ]; then
        echo "$_job_name: requeueing, to continue after $_job_after steps"
        ask_slurm requeue && trap - EXIT && exit 0
    fi
    command_that_continues
    fail "not requeued; fix: continue with: $_job_command"
}

is_preempted() {
    local time
    time=$(field PreemptEligibleTime PreemptTime)
    [[ $(field Requeue) = 1 && ${time:-$(field PreemptTime)} == [0-9]* ]]
}

# Put the command into $_job_command that submits this job once more, with all
# that SLURM tells of what it was asked for.
command_that_continues() {
    local file folder=$run words=() gres memory nice type=''
    add() { # an option, if SLURM says a value
        [ -z "$2" ] || words+=("$1=$2")
    }
    add --job-name "$SLURM_JOB_NAME"
    add --chdir "$_job_folder" # the script's flags may name files there
    add --partition "$(field Partition)"
    add --account "$(field Priority Account)"
    add --qos "$(field Priority QOS)"
    nice=$(field Priority Nice)
    [ "${nice:-0}" = 0 ] || add --nice "$nice"
    add --reservation "$(field Reservation)"
    add --constraint "$(field Features)"
    add --licenses "$(field OverSubscribe Licenses)"
    add --nodelist "$(field ReqNodeList)"
    add --exclude "$(field ReqNodeList ExcNodeList)"
    add --time "$(field RunTime TimeLimit)"
    add --nodes "$SLURM_NNODES"
    gres=$(field TresPerNode),$(field TresPerJob),$(field TresPerTask)
    [[ ! $gres =~ gpu:([^:,=]*[^:,=0-9][^:,=]*) ]] ||
        type=${BASH_REMATCH[1]}: # such as h100:
    add --gpus-per-node "${gpus:+$type$gpus}"
    add --ntasks-per-node "$tasks"
    [[ ! $(field CpusPerTres) =~ gpu:([0-9]+) ]] ||
        add --cpus-per-gpu "${BASH_REMATCH[1]}"
    memory=$(field MinCPUsNode MinMemoryNode)
    [ "${memory:-0}" = 0 ] || add --mem "$memory"
    [[ ! $(field MemPerTres) =~ gpu:([0-9]+[KMGT]?) ]] ||
        add --mem-per-gpu "${BASH_REMATCH[1]}"
    add --mem-per-cpu "$(field MinCPUsNode MinMemoryCPU)"
    [ "$(field OverSubscribe)" != NO ] || words+=(--exclusive)
    [ "$(field Requeue)" != 0 ] || words+=(--no-requeue)
    [[ $_job_export != *ALL,* ]] || words+=("--export=$_job_export")
    if [ "$_job_element" ]; then # the element is added to the folder's name
        add --array "$_job_element"
        folder=${run%"_$_job_element"}
    fi
    if [[ $_job_said =~ $'\n   Command='(.*)$'\n   WorkDir=' ]]; then
        file=${BASH_REMATCH[1]%" ${_job_flags[*]}"} # with the script's flags
    fi
    if [ ! -f "${file-}" ]; then # it came through a pipe
        file=$run/batch-$_job_id.sh
        cp "$0" "$file"
    fi
    printf -v _job_command ' %q' "${words[@]}" "$file" "${_job_flags[@]}"
    _job_command="WORKSHOP_RUN=${folder@Q} sbatch$_job_command"
}

# --- What the batch files use

for _job_variable in run gpus tasks processes cores; do
    (unset "$_job_variable") 2>/dev/null || fail "site.sh makes" \
        "$_job_variable read-only, which the batch files set; fix: rename it" \
        "there"
done
run='' gpus='' tasks='' processes='' cores=''
_job_before=0 _job_after=0 _job_id=$SLURM_JOB_ID
trap 'end_job "no time is left to train; fix: use a longer --time"' USR1 TERM

# In an array SLURM_JOB_ID may mean all of it. Inside an array's job sbatch
# passes the array's variables on to another job.
if [ "$_job_element" ]; then
    ask_about_job
    if [[ -z $_job_said || $_job_said == JobId=*([0-9])" ArrayJobId="* ]]; then
        _job_id=${_job_array}_$_job_element
    else
        _job_element=''
    fi
fi
run=${_job_run:-$WORKSHOP/runs/$_job_name-${_job_id%_*}}
# an absolute path, for commands that are typed in another folder
[[ $run == /* ]] || run=$_job_folder/$run
run=$(realpath -ms "$run${_job_element:+_$_job_element}")

# SLURM signals before the time limit, for a very short job at once, and if the
# job is cancelled or loses its nodes.
[ -z "$_job_signal" ] ||
    end_job "no time is left to train; fix: use a longer --time"
[[ " ${_job_flags[*]}" != *" --run-dir"* ]] || # which signals do not reach
    fail "a job does not take --run-dir; fix: name the run's folder to" \
        "sbatch: WORKSHOP_RUN=DIR sbatch ..."
[ -d "${WORKSHOP_DATA:-/}" ] || fail "WORKSHOP_DATA is $WORKSHOP_DATA, which" \
    "does not exist; fix: correct it in site.sh"

# The processes meet on the first node, at a port of this job's own.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# Each node unpacks the environment if WORKSHOP_VENV is an archive, and says
# how many GPUs and cores SLURM gave it, in whatever way they were asked for.
# Other programs may print there, such as a site's TaskProlog: our lines have a
# mark, and what is in them is the least and the most of all nodes.
# shellcheck disable=SC2016 # the nodes' own variables
ask_nodes() {
    local line mark=job-$_job_id-has nodes=0 most=0 other=''
    while IFS= read -r line; do
        if [[ $line =~ $mark:([0-9]+):([0-9]+): ]]; then
            ((nodes += 1))
            gpus=${gpus:-${BASH_REMATCH[1]}} cores=${cores:-${BASH_REMATCH[2]}}
            ((most >= BASH_REMATCH[1])) || most=${BASH_REMATCH[1]}
            ((gpus <= BASH_REMATCH[1])) || gpus=${BASH_REMATCH[1]}
            ((cores <= BASH_REMATCH[2])) || cores=${BASH_REMATCH[2]}
        else
            other=${other:-$line}
        fi
    done < <(srun --mpi=none --output=all bash -pc '((SLURM_LOCALID)) && exit
        [ -z "$2" ] || bash -p "$1/setup.sh" unpack "$2" >/dev/null || exit
        printf "\n%s\n" "$3:${SLURM_GPUS_ON_NODE:-0}:$SLURM_CPUS_ON_NODE:"
    ' - "$WORKSHOP" "$(sed -n 's/^archive=//p' \
        "${VIRTUAL_ENV-}/workshop-base" 2>/dev/null)" "$mark")
    ((nodes == SLURM_NNODES)) || fail "only $nodes of $SLURM_NNODES nodes" \
        "reported their GPUs and cores${other:+; srun printed: $other}"
    ((gpus == most)) || fail "one node has $most GPUs, another $gpus; fix:" \
        "request equally many on each, with --gpus-per-node"
}
ask_nodes

# A process for each GPU, or without GPUs for each task, of one thread for each
# core. srun starts one thing on each node, such as torchrun, if it is told
# nothing else; since 22.05 it has to be told the cores.
tasks=${SLURM_NTASKS_PER_NODE:-1} processes=$gpus
((gpus)) || processes=$tasks
((tasks == 1 || tasks == processes)) || fail "each node has $gpus GPUs and" \
    "$tasks tasks, but each GPU needs one process; fix: give sbatch" \
    "--ntasks-per-node=$gpus"
((cores /= processes)) || fail "a node has $processes processes, and fewer" \
    "cores; fix: give sbatch --cpus-per-gpu=8"
((!gpus || !_job_most_cores || cores < _job_most_cores)) ||
    cores=$_job_most_cores
((!gpus)) || export SLURM_GPUS_PER_NODE=$gpus
export processes SLURM_NTASKS_PER_NODE=1 OMP_NUM_THREADS=$cores
export SRUN_CPUS_PER_TASK=$((processes * cores))

# What `python -m workshop why` reads if the job hangs or dies: with its hook in
# PYTHONPATH each rank writes there. PyTorch's record keeps 2,000 collectives.
RANKCHECK_WHY=$run/why/$_job_id-${SLURM_RESTART_COUNT-0}
# An empty entry of it would be the working directory
PYTHONPATH=$WORKSHOP/rankcheck/src/rankcheck/system/hook${PYTHONPATH:+:$PYTHONPATH}
export RANKCHECK_WHY PYTHONPATH
export TORCH_FR_BUFFER_SIZE=2000 NCCL_DEBUG=${NCCL_DEBUG-WARN}

# The script of a stage: yours where it passed the check for that stage, else
# the solution. The log says which, and why.
stage() { python -m workshop script "$1"; }

# Say what runs where, and run a command that trains in $run. If it ends before
# the last step, for whatever reason, but has saved a further step, the job is
# requeued, and its next start goes on from the last checkpoint.
train() {
    local - running status asked='' earlier finished=''
    set +eu
    trap 'asked=yes; echo "$_job_name: the time limit is near, saving"' USR1
    count_saved _job_before || true
    earlier=$(begun)
    echo "job       $_job_name $_job_id: $SLURM_NNODES x $gpus GPUs, on" \
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
    wait $running
    status=$?

    count_saved _job_after && finished=yes
    if [[ $(begun) = "$earlier" ]]; then
        # nothing has trained: what is saved are another job's steps, and a
        # run that was finished before says nothing of a command that fails
        _job_after=$_job_before
        ((status == 0)) || finished=''
    fi
    [ -z "$finished" ] || exit 0
    end_job "stopped and not requeued: no further step was saved; fix: find" \
        "the cause above, or by python -m workshop why ${run@Q}"
}

# Put the number of saved steps into the variable that is named. Returns 0 if
# the run is finished. A signal to all processes of the job ends Python, too.
count_saved() {
    local said status tries
    for tries in 1 2 3; do
        said=$(python -m workshop progress "$run")
        status=$?
        [[ ! $said =~ ([0-9]+)" of "[0-9?]+" steps" ]] || break
    done
    printf -v "$1" %s "${BASH_REMATCH[1]:-${!1}}"
    [[ ${BASH_REMATCH[1]} ]] && return $status
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
    elif command -v amd-smi >/dev/null; then # it is a Python program
        command=(env PYTHONUNBUFFERED=1 amd-smi monitor -pum --csv -w 10)
    else
        return
    fi
    mkdir -p "$run"
    # it shares the processes' resources, and ends with the job
    srun --overlap --mpi=none --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --open-mode=append --output="$run/gpus-%N.txt" "${command[@]}" \
        2>/dev/null & # srun would say that it was ended
}
