"""The batch files for PBS, run as PBS would, without its server.

The variables and the node file are what PBS sets. mpiexec, the processes, the
signal before the time limit and the checkpoints are real. `qstat` and `qsub`
are programs that say what OpenPBS 23.06 says of a job, with its line breaks,
and write down what was submitted.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import COUNTS, clone_course, holding, world
from conftest import needs, program
from stages import Result

from backstage.record import RECORD
from workshop.jobs.mpirun import OPEN_MPI
from workshop.results.runs import CONFIG
from workshop.results.runs import COUNTS as COUNTS_OF_A_RUN

FLAGS = "--preset tiny --device cpu --microbatch-size 1"
TWO = f"{socket.gethostname()}\n" * 2  # ranks on this node

QSTAT = """#!/bin/sh
echo "Job Id: $2
    Job_Name = stage
    Account_Name = my-project
    Resource_List.place = scatter
    Resource_List.select = 1:ncpus=32:ngpus=4:mpiprocs=4
    Resource_List.walltime = 00:00:14
    schedselect = 1:ncpus=32:ngpus=4:mpiprocs=4
    Submit_arguments = -A my-project -qworkq -l walltime=00:00:14,
	place=scatter -v STAGE=ddp,FLAGS=--preset tiny --device cpu --microbatch
	-size 1 --prompt -q -l=x --max-steps 100000 -l filesystems=home:eagl
	e -N mine -W group_list=a -o log batchfiles/pbs/batch-stage.sh
    project = _pbs_project_default
"
"""
# A first start takes longer than there is time
SLOW = """import os, sys, time
folder = sys.argv[sys.argv.index("--run-dir") + 1]
time.sleep(0 if os.path.exists(f"{folder}/checkpoints") else 9)
"""
QSUB = """#!/bin/sh
for word; do echo "$word"; done > "$SUBMITTED"
echo 124.pbs
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository that submits, and the nodes' programs."""
    clone = tmp_path_factory.mktemp("pbs") / "my clone"
    clone_course(clone)
    (clone / "site.sh").write_text(
        f'WORKSHOP_VENV="{sys.prefix}"\neval "${{SITE-}}"\n')
    return clone


def run(clone, stage, nodes=None, bin="", file="stage", **variables):
    """Run a batch file with what PBS sets; the finished process."""
    nodes_file = clone / "nodes"
    nodes_file.write_text(nodes or f"{socket.gethostname()}\n" * 4)
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("SLURM_", "WORKSHOP_D"))}
    env |= {**OPEN_MPI, "PBS_O_WORKDIR": str(clone), "PBS_JOBNAME": "stage",
            "PBS_JOBID": "123.pbs", "PBS_NODEFILE": str(nodes_file),
            "STAGE": stage, "NCPUS": "4", "OMP_NUM_THREADS": "4",
            "PATH": f"{bin}{os.pathsep * bool(bin)}{os.environ['PATH']}",
            **variables}
    process = subprocess.Popen(
        ["bash", clone / "batchfiles" / "pbs" / f"batch-{file}.sh"], env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        start_new_session=True)
    try:
        out, err = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(stage, process.returncode, out, err)


@pytest.mark.whole
def test_it_goes_on_after_its_time_limit(clone, tmp_path):
    """First with MPICH, then, as a new job, with Open MPI."""
    needs("mpiexec", "mpiexec.mpich")
    program(tmp_path / "qstat", QSTAT)
    program(tmp_path / "qsub", QSUB)
    program(tmp_path / "mpiexec", '#!/bin/sh\nexec mpiexec.mpich "$@"\n')
    for library in Path("/usr/lib").glob("*/libmpich.so.12"):
        (tmp_path / "libmpi.so.12").symlink_to(library)  # docs/launching.md
    submitted, folder = tmp_path / "submitted", tmp_path / "run"
    flags = f"{FLAGS} --prompt -q -l=x --max-steps 100000"
    with holding(clone / "solutions" / "train_gpt2_ddp.py", SLOW + COUNTS):
        done = run(clone, "ddp", bin=str(tmp_path), FLAGS=flags,
                   SUBMITTED=str(submitted), WORKSHOP_RUN=str(folder),
                   LD_LIBRARY_PATH=str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        (steps,) = re.findall(r"a new job continues after (\d+) ", done.stdout)
        again = run(clone, "ddp", FLAGS=flags.replace(
            "100000", str(int(steps) + 5)), WORKSHOP_RUN=str(folder))
    *options, option, variables, file = submitted.read_text().splitlines()
    assert options == ["-A", "my-project", "-qworkq", "-l",
                       "walltime=00:00:14,place=scatter", "-l",
                       "filesystems=home:eagle", "-N", "mine", "-W",
                       "group_list=a"]
    assert option == "-v" and variables == (
        f"WORKSHOP_RUN={folder},STAGE=ddp,FLAGS={flags}")
    assert Path(file) == clone / "batchfiles" / "pbs" / "batch-stage.sh"
    assert again.returncode == 0, again.stdout + again.stderr
    for job in (done, again):
        assert "job       stage 123.pbs, on " in job.stdout
        assert job.stdout.count("\nnode None") == 4
    assert "stopped by SIGUSR1" in done.stdout
    assert Result(folder, []).column("step") == list(range(int(steps) + 5))


@pytest.mark.whole
def test_the_printed_command_is_the_same_job(clone, tmp_path):
    """After qdel: with what qsub was told, in the same run."""
    for name, text in ("qstat", QSTAT), ("qsub", QSUB), (
            "mpiexec", "#!/bin/sh\n[ $1 != --version ] || exit 0\n"
            "kill $PPID; sleep 1; exit 1\n"):
        program(tmp_path / name, text)
    flags = f"{FLAGS} --prompt -q -l=x --max-steps 100000"
    run_folder = tmp_path / "my run"
    done = run(clone, "ddp", bin=str(tmp_path), FLAGS=flags,
               WORKSHOP_RUN=str(run_folder))
    command = done.stderr.rpartition(" with: ")[2]
    submitted = tmp_path / "submitted"
    subprocess.run(["bash", "-c", command], check=True, cwd="/", env={
        **os.environ, "SUBMITTED": str(submitted),
        "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert submitted.read_text().splitlines() == [
        "-A", "my-project", "-qworkq", "-l",
        "walltime=00:00:14,place=scatter", "-l", "filesystems=home:eagle",
        "-N", "mine", "-W", "group_list=a", "-v",
        f"WORKSHOP_RUN={run_folder},STAGE=ddp,FLAGS={flags}",
        str(clone / "batchfiles" / "pbs" / "batch-stage.sh")]


@pytest.mark.whole
def test_a_command_that_fails_in_a_finished_run(clone, tmp_path):
    """The job fails; that the run was finished before is no success."""
    program(tmp_path / "mpiexec", '#!/bin/sh\nexit "$STATUS"\n')
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000003.pt").touch()
    ones = dict.fromkeys((*CONFIG, *COUNTS_OF_A_RUN), 1)
    (folder / RECORD).write_text(json.dumps({
        "stage": "ddp", "device": "cpu", "max_steps": 3, "config": ones,
        "world_size": 1, "nodes": 1, "startup": 1.5,
        "hyperparameters": ones | {"preset": "nano", "data": "x"}}))
    for status in 0, 1:
        done = run(clone, "ddp", bin=str(tmp_path), STATUS=str(status),
                   WORKSHOP_RUN=str(folder))
        assert done.returncode == status, done


# What PBS and an MPI that it knows would do on two nodes, by MPICH and SLURM
ON_TWO_NODES = r"""#!/bin/bash
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed p >nodes
mkdir mpich
ln -s /usr/lib/*/libmpich.so.12 mpich/libmpi.so.12
cat >mpich/mpiexec <<END
#!/bin/sh
[ "\$1" != --version ] || exec mpiexec.mpich --version
export SLURM_JOB_ID=$SLURM_JOB_ID UCX_TLS=tcp,self
exec mpiexec.mpich -launcher slurm -f "$PWD/nodes" "\$@"
END
chmod +x mpich/mpiexec
for name in ${!SLURM_*}; do [ "$name" = SLURM_CONF ] || unset "$name"; done
export PBS_NODEFILE=$PWD/nodes PBS_JOBID=123.pbs PBS_JOBNAME=stage STAGE=ddp
export PBS_O_WORKDIR=$WORKSHOP WORKSHOP_RUN=$PWD/run FLAGS="--max-steps 3"
export PATH=$PWD/mpich:$PATH LD_LIBRARY_PATH=$PWD/mpich
bash "$WORKSHOP/batchfiles/pbs/batch-stage.sh"
"""


@pytest.mark.whole
def test_on_two_nodes(slurm, tmp_path):
    """Each has as many ranks as the node file names it."""
    needs("mpiexec.mpich")
    program(tmp_path / "job.sh", ON_TWO_NODES)
    with slurm.counting("ddp"):
        job = slurm("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1",
                    "--output=%j.log", f"--chdir={tmp_path}",
                    tmp_path / "job.sh").stdout.strip()
        end = slurm.wait(job)
    log = (tmp_path / f"{job}.log").read_text()
    assert end["JobState"] == "COMPLETED", log
    assert world(tmp_path / "run") == (2, 4)
    assert "place     PBS job 123.pbs: 2 x 2 processes, on node1 node2" in log
    assert sorted(re.findall("^node .", log, re.M)) == [
        "node 0", "node 0", "node 1", "node 1"]


@pytest.mark.whole
def test_a_job_that_trains(clone, data, tmp_path):
    """With mpi, which asks its own launcher. Open MPI binds nothing."""
    needs("mpiexec")
    done = run(clone, "mpi", TWO, WORKSHOP_RUN=str(tmp_path / "run"),
               OMPI_MCA_hwloc_base_binding_policy="core:overload-allowed",
               OMPI_MCA_hwloc_base_report_bindings="1", NCPUS="2",
               FLAGS=f"{FLAGS} --data {data} --max-steps 3")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "run" / "hyperparameters.json").read_text())
    assert said["world_size"] == 2 == done.stderr.count(" is not bound (")


@pytest.mark.whole
def test_the_doctor_as_a_job(clone, tmp_path):
    """What mpiexec is to start; what ranks answer is in test_slurm.py."""
    program(tmp_path / "mpiexec", '#!/bin/sh\necho ran "$@"\n')
    done = run(clone, "", TWO, bin=str(tmp_path), file="doctor")
    assert re.search("^ran -n 2 .* python -m workshop doctor --ranks$",
                     done.stdout, re.M), done


@pytest.mark.whole
@pytest.mark.parametrize(("variables", "words"), [
    ({"nodes": "nowhere.invalid\n"}, "names nowhere.invalid, which "),
    ({"PBS_NODEFILE": "/proc/nowhere"}, "submit this with qsub"),
    ({"PBS_O_WORKDIR": ""}, "submit this file with qsub"),
    ({"PBS_O_WORKDIR": "/proc/nowhere"},
     "/proc/nowhere/batchfiles/pbs/job.sh"),
    ({"stage": ""}, "name a stage, as in qsub -v STAGE=ddp"),
    ({"WORKSHOP_DATA": "/proc/nowhere"}, "correct it in site.sh"),
    ({"SITE": "exit"},
     "site.sh calls exit, which ends the job; fix: use return"),
    ({"PBS_ENVIRONMENT": "PBS_INTERACTIVE", "FLAGS": "--preset tiny"},
     "with: python -m workshop launch ddp -- --preset tiny"),
    ({"SITE": "false"}, "a command in"),
    ({"SITE": "run=/x root=/x flags=(x) batchfiles=/x; STAGE=tp\n"
      " fail() { :; }; train() { :; }; IFS=:", "mpiexec": "exit 1"},
     "stopped and not continued: no further step was saved"),
    ({"FLAGS": "--run-dir mine"}, "run's folder to qsub: -v WORKSHOP_RUN=DIR"),
    ({"mpiexec": "exit 1"},
     "stopped and not continued: no further step was saved"),
    ({"mpiexec": "mkdir -p $WORKSHOP_RUN/checkpoints; touch $WORKSHOP_RUN/"
      "checkpoints/step_00000009.pt; exit 1"},  # as another job does
     "stopped and not continued: no further step was saved"),
    # as qdel does: the job's shell gets the signal, too
    ({"mpiexec": "kill $PPID; sleep 1; exit 1"},
     "ended by qdel, or by PBS at the time limit; fix: continue after")])
def test_what_is_wrong_is_one_line(clone, tmp_path, variables, words):
    if "mpiexec" in variables:
        variables = dict(variables)
        program(tmp_path / "mpiexec", "#!/bin/sh\n[ $1 != --version ] || exit "
                f"0\n{variables.pop('mpiexec')}\n")
    done = run(clone, bin=str(tmp_path), **{
        "stage": "ddp", "WORKSHOP_RUN": str(tmp_path / "run"), **variables})
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and words in line
