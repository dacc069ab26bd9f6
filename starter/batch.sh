#!/bin/bash -l
# Submit it in the folder of train.py: sbatch batch.sh --max-steps 1000
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4     # a process for each GPU
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # two minutes before: save, requeue
#SBATCH --requeue --open-mode=append

if [[ " $*" == *" --run-dir"* ]]; then
    echo "error: a job's run is in runs/, by its number; fix: omit --run-dir" >&2
    exit 2
fi
asked=''
trap asked=yes USR1 # from SLURM, before the time limit

# Load your site's modules and activate your environment here.

# The processes meet on the first node, at a port of this job's own.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since 22.05 srun needs it

job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID} # of an array this element alone
run=${STARTER_RUN:-runs/$job} # the same after a requeue: it goes on
rm -f "$run/training"     # train.py makes it in its first step
trap : TERM               # the processes get it as well
srun --kill-on-bad-exit=1 python train.py --run-dir "$run" --resume "$@" &
processes=$!
while kill -0 $processes 2>/dev/null; do
    sleep 1 # a signal before the first step could end Python
    if [ "$asked" ] && [ -e "$run/training" ]; then
        kill -USR1 $processes # srun passes it on to all of them
        asked=''
    fi
done
wait $processes
status=$?
if [ "$asked" ] && [ ! -e "$run/training" ]; then
    echo "the time limit came before the first step; fix: use a longer --time"
fi
[ "$status" = 0 ] || exit "$status"
[ -e "$run/finished" ] && exit 0
state=$(squeue -h -j "$job" -o %T) # another one after scancel
if [ -e "$run/training" ] && [ "${state:-RUNNING}" = RUNNING ]; then
    scontrol requeue "$job" && exit 0
fi

# Not finished, and not requeued: a status of 0 would start what depends on it.
again=(sbatch --export="ALL,STARTER_RUN=$run" --nodes="$SLURM_JOB_NUM_NODES")
for option in partition:JOB_PARTITION account:JOB_ACCOUNT qos:JOB_QOS \
    reservation:JOB_RESERVATION gpus-per-node:GPUS_PER_NODE \
    ntasks-per-node:NTASKS_PER_NODE cpus-per-task:CPUS_PER_TASK; do
    value=SLURM_${option#*:}
    [ -z "${!value}" ] || again+=("--${option%:*}=${!value}")
done
limit=$(squeue -h -j "$SLURM_JOB_ID" -o %l)
[ -z "$limit" ] || again+=("--time=$limit")
if scontrol show job "$SLURM_JOB_ID" | grep -q 'Requeue=0'; then
    again+=(--no-requeue)
fi
echo "error: the run is not finished, and the job was not requeued; fix:" \
    "continue with:"
printf ' %q' "${again[@]}" batch.sh "$@"
echo
exit 1
