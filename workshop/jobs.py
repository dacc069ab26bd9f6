"""Writes the batch files of all stages: python -m workshop.jobs

They follow from the registry, so edit it or the templates here, and not them.
Only the standard library, from Python 3.9 on.
"""

from backstage import ROOT
from backstage.errors import run_main
from backstage.files import write_atomically
from workshop.stages import STAGES

BATCH_FILE = r"""#!/bin/bash -l
# {what}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --gpus-per-node={gpus}
#SBATCH --ntasks-per-node={tasks}     # {tasks_are}
#SBATCH --cpus-per-task={cores:<7} # {cores_are}
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120     # 2 to 3 minutes before: save, requeue
#SBATCH --requeue --open-mode=append

source "$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's|^ *Command=\(.*/batchfiles\)/.*|\1|p')/job.sh" || exit 1

train srun --kill-on-bad-exit=1 {command} \
    "$(stage {stage})" --run "$run" --resume{flags} "$@"
"""
PBS_FILE = r"""#!/bin/bash -l
# {what}
#PBS -N {name}
#PBS -l select={nodes}:ncpus={cores}:ngpus={gpus}:mpiprocs={gpus}
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe
#PBS -r n

source "$PBS_O_WORKDIR/batchfiles/pbs/job.sh" || exit 1

export OMP_NUM_THREADS={threads}
train {command} "$(stage {stage})" \
    --run "$run" --resume{flags} "${{flags[@]}}"
"""
MPIEXEC = 'mpiexec -n {processes} "${{per_node[@]}}" {gpus} \\\n    python'
PBS_SIZES = {"python": ("1n1g",), "torchrun": ("1n4g", "2n4g"),
             "mpirun": ("1n4g", "2n4g")}  # by launcher
CORES = 8  # for each GPU


def batch_file(stage, size):
    """The text of a stage's batch file for "2n4g": 2 nodes, 4 GPUs each."""
    nodes, gpus = numbers(size)
    each = " on each node" if nodes > 1 else ""
    if stage.launcher == "python":
        tasks, tasks_are = 1, "srun starts one process"
    else:
        tasks = gpus
        tasks_are = f"srun starts {count(gpus, 'process', 'processes')}{each}"
    cores, cores_are, command = CORES, "for each process", "python"
    if stage.launcher == "torchrun" and not stage.trainer:
        tasks, tasks_are = 1, f"a torchrun{each}, which starts {gpus}"
        cores, cores_are = CORES * gpus, f"for each torchrun: {CORES} a GPU"
        command = '"$batchfiles/torchrun.sh"'
    return BATCH_FILE.format(
        **in_both(stage, size), tasks=tasks, tasks_are=tasks_are, cores=cores,
        cores_are=cores_are, command=command)


def pbs_file(stage, size):
    """The same for PBS: mpiexec starts a process for each GPU."""
    nodes, gpus = numbers(size)
    command = "python"
    if stage.launcher != "python":
        command = MPIEXEC.format(processes=nodes * gpus, gpus=gpus)
    if stage.launcher == "torchrun":
        command += " -m workshop.as_torchrun"
    return PBS_FILE.format(
        **in_both(stage, size), cores=CORES * gpus, threads=CORES,
        command=command)


def numbers(size):
    """How many nodes, and how many GPUs on each: (2, 4) for "2n4g"."""
    return int(size[0]), int(size[2])


def in_both(stage, size):
    """What SLURM's and PBS's templates have in common."""
    nodes, gpus = numbers(size)
    what = (f"{stage.label} on {count(nodes, 'node')} with "
            f"{count(gpus, 'GPU')}{' each' if nodes > 1 else ''}")
    if stage.launcher != "python":
        what += f": {count(nodes * gpus, 'process', 'processes')}"
    elif gpus > 1:
        what += ". The others stay idle"
    flags = stage.jobs[size]
    return {"what": f"{what}.", "name": f"{stage.name}-{size}",
            "stage": stage.name, "nodes": nodes, "gpus": gpus,
            "flags": f" \\\n    {flags}" if flags else ""}


def count(number, one, many=None):
    """For example "1 node" or "2 nodes"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def files():
    """Each file's path and text."""
    for stage in STAGES.values():
        for size in stage.jobs:
            yield (ROOT / "batchfiles" / f"batch-{stage.name}-{size}.sh",
                   batch_file(stage, size))
            if size in PBS_SIZES[stage.launcher]:
                yield (ROOT / "batchfiles" / "pbs"
                       / f"batch-{stage.name}-{size}.sh",
                       pbs_file(stage, size))


def main():
    for path, text in files():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, text.encode())
        path.chmod(0o755)


if __name__ == "__main__":
    run_main(main)
