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
    echo "error: a job's run is in runs/, by its number: no --run-dir" >&2
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
run=runs/$job             # the same after a requeue: it goes on
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
    echo "the time limit came near before the first step: give a longer --time"
fi
state=$(squeue -h -j "$job" -o %T) # another one after scancel
if [ "$status${state:-RUNNING}" = 0RUNNING ] && [ ! -e "$run/finished" ]; then
    scontrol requeue "$job"
fi
exit "$status"
