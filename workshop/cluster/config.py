"""The text of the files that SLURM and a shell read."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass

from workshop.cluster.settings import ClusterFolder, ClusterSettings

CONTROLLER = "labctl"  # the host name of slurmctld
NETWORK_PREFIX = "10.77.0."  # which is only seen in the cluster's namespaces
SLURM_COMMANDS = ("sbatch", "srun", "salloc", "squeue", "scancel", "scontrol",
                  "sinfo")
# What a site's site.sh asks for, and this cluster does not have
SITE = ("SBATCH_PARTITION", "SBATCH_RESERVATION", "SBATCH_CONSTRAINT",
        "SALLOC_PARTITION", "SALLOC_RESERVATION", "SALLOC_CONSTRAINT")
CLUSTER_EPOCH = 1_767_225_600  # 2026-01-01, in seconds since 1970
# Since this version of SLURM, slurmd uses cgroups unless it is told not to
DISABLES_CGROUPS = (23, 11)

# Partitions: gpu; urgent, which takes nodes from gpu's jobs after 30 s of
# grace; closed, where jobs wait for ever.
SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={controller}({network}1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={socket},cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/{task_plugin}
TaskProlog={folder}/etc/task-prolog
SelectType=select/cons_tres
SelectTypeParameters={consumable}
GresTypes=gpu
ReturnToService=2
EnforcePartLimits=ALL
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=15
MinJobAge=3600
FirstJobId={first_job}
SlurmctldTimeout=10
SlurmdTimeout={node_timeout}
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=gpu {partition} Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent {partition} PriorityTier=2 PreemptMode=OFF
PartitionName=closed {partition} State=DOWN
"""
PARTITION = "Nodes=ALL DefaultTime=10 MaxTime=INFINITE"

# What each task of a job is told, also its batch file.
TASK_PROLOG = """\
#!/bin/sh
echo export WORKSHOP_GPUS=simulated
"""

# A shell's sbatch and so on. In the namespaces themselves it is hidden: jobs
# inherit the PATH of the shell that has submitted them. A site may have SLURM,
# too. Its configuration, the names of its clusters, and the variables of its
# job in which this shell runs, which SLURM reads as options, are not for this
# cluster.
COMMAND = """\
#!/bin/sh
# {command} in the namespaces of a cluster that `python -m workshop cluster up`
# has started. The process may have ended, and another may have its number,
# also one of another user, with the same words.
if ! [ -O /proc/{pid} ] ||
    ! tr '\\0' ' ' 2>/dev/null </proc/{pid}/cmdline |
    grep -qF -e ' workshop.cluster.inside cluster {folder} '; then
    echo "{command}: the cluster in {folder} is not up; fix:" \\
        "python -m workshop cluster up" >&2
    exit 1
fi
for name in $(env | sed -n \
    's/^\\(SLURM_[A-Z0-9_]*\\|S[A-Z]*_CLUSTERS\\)=.*/\\1/p'); do
    [ "$name" = SLURM_TIME_FORMAT ] || unset "$name"
done
export SLURM_CONF={folder}/etc/slurm.conf
exec nsenter --target {pid} {user}--mount --uts --net \\
    --pid=/proc/{pid}/ns/pid_for_children -- \\
    sh -c 'cd "$1" && shift && exec "$@"' sh "$PWD" {program} "$@"
"""


@dataclass(frozen=True)
class Programs:
    """The programs that run the cluster, their version and their user."""

    sbatch: str  # the others are beside it
    version: tuple[int, ...]
    user: str
    is_root: bool

    def find(self, command: str) -> str:
        return self.sbatch[:-len("sbatch")] + command


def write_files(place: ClusterFolder, settings: ClusterSettings,
                programs: Programs) -> None:
    """Write what the daemons read."""
    place.config.write_text(make_slurm_conf(place, settings, programs))
    gres = (f"AutoDetect=off\nName=gpu Type={settings.gpu_type} "
            f"File={place.devices}/nvidia[0-{settings.gpus - 1}]\n")
    place.config.with_name("gres.conf").write_text(gres)
    place.config.with_name("cgroup.conf").write_text(
        make_cgroup_conf(settings, programs))
    prolog = place.config.with_name("task-prolog")
    prolog.write_text(TASK_PROLOG)
    prolog.chmod(0o755)
    lines = ["127.0.0.1 localhost", f"{NETWORK_PREFIX}1 {CONTROLLER}"]
    for number, name in enumerate(settings.names, 1):
        lines.append(f"{address(number)} {name}")
        # as PyTorch asks for the name of a client, which it else warns of
        lines.append(f"::ffff:{address(number)} {name}.lab")
    place.hosts.write_text("\n".join(lines) + "\n")


def address(number: int) -> str:
    """Return the address of a node, which are counted from 1 on."""
    return f"{NETWORK_PREFIX}{10 + number}"


def make_slurm_conf(place: ClusterFolder, settings: ClusterSettings,
                    programs: Programs) -> str:
    """Return the text of slurm.conf."""
    nodes = [
        f"NodeName={name} NodeAddr={address(number)} Port=6818 "
        f"CPUs={settings.cpus} Boards=1 SocketsPerBoard=1 "
        f"CoresPerSocket={settings.cpus} ThreadsPerCore=1 "
        f"RealMemory={settings.memory} "
        f"Gres=gpu:{settings.gpu_type}:{settings.gpus} State=UNKNOWN"
        for number, name in enumerate(settings.names, 1)]
    task_plugin, consumable = "none", "CR_Core"
    if settings.limits_memory:
        task_plugin, consumable = "cgroup", "CR_Core_Memory"
    return SLURM_CONF.format(
        controller=CONTROLLER, network=NETWORK_PREFIX, user=programs.user,
        socket=place.socket, folder=place.folder, task_plugin=task_plugin,
        consumable=consumable, node_timeout=settings.node_timeout,
        first_job=first_job(time.time()),
        nodes="\n".join(nodes), partition=PARTITION)


def first_job(now: float) -> int:
    """Return the number of the first job of a cluster that starts now.

    A job's run and log have its number, and a job goes on in a run that is
    there. So no later cluster may have the same ones: it has a number for each
    ten seconds since 2026. SLURM's largest comes after 20 years.
    """
    return max(1, int(now - CLUSTER_EPOCH) // 10)


def make_cgroup_conf(settings: ClusterSettings, programs: Programs) -> str:
    """Return the text of cgroup.conf."""
    if settings.limits_memory:
        return "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n"
    if programs.version >= DISABLES_CGROUPS:
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\n"  # which no plugin of ours loads


def write_commands(place: ClusterFolder, programs: Programs, pid: int) -> None:
    """Write what a shell uses: SLURM's commands, and the file to source.

    Args:
        pid: the process that holds the cluster's namespaces.
    """
    user = "" if programs.is_root else "--user --preserve-credentials "
    for command in SLURM_COMMANDS:
        file = place.bin / command
        file.write_text(COMMAND.format(
            command=command, pid=pid, folder=place.folder, user=user,
            program=programs.find(command)))
        file.chmod(0o755)
    place.environment.write_text(make_environment(place))


def make_environment(place: ClusterFolder) -> str:
    """Return the lines by which a shell uses the cluster."""
    entry = shlex.quote(str(place.bin))
    return (f"export SLURM_CONF={shlex.quote(str(place.config))}\n"
            f"case :$PATH: in *:{entry}:*) ;; *) PATH={entry}:$PATH ;; esac\n"
            f"export PATH\nunset {' '.join(SITE)}\n")
