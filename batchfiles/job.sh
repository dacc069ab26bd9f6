# What the batch files share: a job's environment, and how the job goes on
# after its time limit. They source this file, so `exit` ends the job. WORKSHOP
# is the course's folder: activate.sh sets it, and sbatch passes it on.
# shellcheck shell=bash disable=SC2034 # they use the variables

fail() {
    echo "$SLURM_JOB_NAME: $*" >&2
    exit 1
}

# SLURM sends this before the time limit: too early for a very short job.
trap 'fail "no time is left to train: give sbatch a longer --time"' USR1

# GPUs on each node (SLURM may say "h100:4"), and cores for each of them.
gpus=${SLURM_GPUS_PER_NODE##*:}
cores=$SLURM_CPUS_PER_GPU

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

run=${WORKSHOP_RUN:-$WORKSHOP/runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}

# Load the site's modules and the environment. Jobs install nothing.
WORKSHOP_INSTALL=no source "$WORKSHOP/activate.sh" >/dev/null || exit 1
if [ -n "${WORKSHOP_DATA-}" ] && [ ! -d "$WORKSHOP_DATA" ]; then
    fail "WORKSHOP_DATA is $WORKSHOP_DATA, which does not exist: fix site.sh"
fi

# Each node unpacks the environment if WORKSHOP_VENV is an archive.
archive=$(sed -n 's/^archive=//p' "${VIRTUAL_ENV-}/workshop-base" 2>/dev/null)
if [ -n "$archive" ]; then
    srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        bash "$WORKSHOP/setup.sh" unpack "$archive" >/dev/null || exit 1
fi

# The processes meet on the first node, at a port of this job's own.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
if ((gpus)); then # a process for each, of one thread for each core
    export OMP_NUM_THREADS=$cores
    # since 22.05 srun has to be told
    export SRUN_CPUS_PER_TASK=$((gpus * cores / SLURM_NTASKS_PER_NODE))
fi

# What `python -m workshop why` reads if the job hangs or dies: with its hook in
# PYTHONPATH each rank writes there. PyTorch's record keeps 2,000 collectives.
WORKSHOP_WHY=$run/why/$SLURM_JOB_ID-${SLURM_RESTART_COUNT-0}
export WORKSHOP_WHY PYTHONPATH=$WORKSHOP/workshop/why/hook:$PYTHONPATH
export TORCH_FR_BUFFER_SIZE=2000 NCCL_DEBUG=${NCCL_DEBUG-WARN}

# The script of a stage: yours where it passed the check for that stage, else
# the solution. The log says which, and why.
stage() {
    python -m workshop script "$1"
}

# Run a command that trains in $run. If it ends before the last step, for
# whatever reason, but has saved a further step, the job goes back to the queue
# and its next start goes on from the last checkpoint.
train() {
    local before after processes state
    before=$(progress)
    describe "$@"
    watch_gpus
    trap 'kill -USR1 $processes' USR1 # srun passes it on to all of them
    trap : TERM                       # from scancel: they get it as well
    "$@" &
    processes=$!
    while kill -0 $processes 2>/dev/null; do
        wait $processes # returns at each signal
    done

    if python -m workshop progress "$run" >/dev/null; then
        exit 0
    fi
    state=$(ask_slurm squeue -h -j "$SLURM_JOB_ID" -o %T)
    if [ "$state" != RUNNING ]; then
        fail "cancelled, or requeued by SLURM: python -m workshop why ${run@Q}"
    fi
    after=$(progress)
    if [ "$after" = "$before" ]; then
        fail "stopped and not requeued: no further step was saved, see above:" \
            "python -m workshop why ${run@Q}"
    fi
    echo "$SLURM_JOB_NAME: requeueing, to go on after $after steps"
    ask_slurm scontrol requeue "$SLURM_JOB_ID" ||
        fail "not requeued; go on with: WORKSHOP_RUN=$run sbatch" \
            "--nodes=$SLURM_NNODES --gpus-per-node=$gpus" \
            "$WORKSHOP/batchfiles/batch-$SLURM_JOB_NAME.sh"
    exit 0
}

# Ask again where SLURM is too busy to answer.
ask_slurm() {
    "$@" || { sleep 10 && "$@"; } || { sleep 30 && "$@"; }
}

# The number of steps that are saved.
progress() {
    local saved
    saved=$(python -m workshop progress "$run")
    echo "${saved%% *}"
}

# Say what runs where, at the top of the log.
describe() {
    local commit
    commit=$(python -c 'from workshop import doctor
print(doctor.name_commit())')
    echo "job       $SLURM_JOB_NAME $SLURM_JOB_ID: $SLURM_NNODES x" \
        "$gpus GPUs, on $SLURM_JOB_NODELIST"
    python -c 'if True:
        import platform, sys
        from importlib.metadata import version
        print("software  Python", platform.python_version(), "torch",
              version("torch"), "lightning", version("lightning"),
              "commit", sys.argv[1])' "$commit"
    echo "data      ${WORKSHOP_DATA:-no WORKSHOP_DATA}, unless --data is given"
    echo "command   $*"
}

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
    srun --overlap --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --open-mode=append --output="$run/gpus-%N.txt" "${command[@]}" \
        2>/dev/null & # srun would say that it was ended
}
