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
from cluster import clone_course
from conftest import needs, program
from stages import FOLDER, Result

from backstage import ROOT
from workshop import launch
from workshop.processes import OPEN_MPI
from workshop.stages import STAGES

GOLDEN = FOLDER / "golden"
FLAGS = f"--preset tiny --device cpu --data {GOLDEN} --microbatch-size 1"
FILES = sorted((ROOT / "batchfiles" / "pbs").glob("batch-*.sh"))

QSTAT = """#!/bin/sh
echo "Job Id: $2
    Job_Name = ddp-1n4g
    Account_Name = my-project
    Resource_List.place = scatter
    Resource_List.select = 1:ncpus=32:ngpus=4:mpiprocs=4
    Resource_List.walltime = 00:01:04
    schedselect = 1:ncpus=32:ngpus=4:mpiprocs=4
    Submit_arguments = -A my-project -qworkq -l walltime=00:01:04,
	place=scatter -v FLAGS=--preset tiny --device cpu --microbatch-size 1 -
	-max-steps 100000 -l filesystems=home:eagl
	e batchfiles/pbs/batch-ddp-1n4g.sh
    project = _pbs_project_default
"
"""
QSUB = """#!/bin/sh
for word; do echo "$word"; done > "$SUBMITTED"
echo 124.pbs
"""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_asks_for_what_its_name_says(file):
    text = file.read_text()
    assert f"#PBS -N {file.stem.removeprefix('batch-')}\n" in text
    if file.stem == "batch-fineweb":
        assert "select=1:" in text and "mpiexec" not in text
        return
    stage, nodes, gpus = re.fullmatch(
        r"batch-(\w+)-(\d)n(\d)g",
        file.stem.replace("-doctor", "-doctor-2n4g")).groups()
    assert f"select={nodes}:ncpus={8 * int(gpus)}:ngpus={gpus}:" in text
    launcher = "mpirun" if stage == "doctor" else STAGES[stage].launcher
    assert ("workshop.as_torchrun" in text) == (launcher == "torchrun")
    start = f'mpiexec -n {int(nodes) * int(gpus)} "${{per_node[@]}}" {gpus} '
    assert (start in text) == ("mpiexec" in text) == (launcher != "python")
    assert stage == "doctor" or f'"$(stage {stage})"' in text


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository that submits, and the nodes' programs."""
    clone = tmp_path_factory.mktemp("pbs") / "my clone"
    clone_course(clone)
    (clone / "site.sh").write_text(f'WORKSHOP_VENV="{sys.prefix}"\n')
    return clone


def run(clone, name, nodes=None, bin="", **variables):
    """Run a batch file with what PBS sets; the finished process."""
    nodes_file = clone / "nodes"
    nodes_file.write_text(nodes or f"{socket.gethostname()}\n" * 4)
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("SLURM_", "WORKSHOP_D"))}
    env |= {**OPEN_MPI, "PBS_O_WORKDIR": str(clone), "PBS_JOBNAME": name,
            "PBS_JOBID": "123.pbs", "PBS_NODEFILE": str(nodes_file),
            "PATH": f"{bin}{os.pathsep * bool(bin)}{os.environ['PATH']}",
            **variables}
    process = subprocess.Popen(
        ["bash", clone / "batchfiles" / "pbs" / f"batch-{name}.sh"], env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        start_new_session=True)
    try:
        out, err = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(name, process.returncode, out, err)


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
    flags = f"{FLAGS} --max-steps 100000 --eval-every 100000"
    done = run(clone, "ddp-1n4g", bin=str(tmp_path), FLAGS=flags,
               SUBMITTED=str(submitted), WORKSHOP_RUN=str(folder),
               LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (steps,) = re.findall(r"a new job goes on after (\d+) steps", done.stdout)
    *options, option, variables, file = submitted.read_text().splitlines()
    assert options == ["-A", "my-project", "-qworkq", "-l",
                       "walltime=00:01:04,place=scatter", "-l",
                       "filesystems=home:eagle"]
    assert option == "-v" and variables == (
        f"WORKSHOP_RUN={folder},FLAGS={flags}")
    assert Path(file) == clone / "batchfiles" / "pbs" / "batch-ddp-1n4g.sh"

    again = run(clone, "ddp-1n4g", FLAGS=flags.replace(
        "100000 ", f"{int(steps) + 5} ", 1), WORKSHOP_RUN=str(folder))
    assert again.returncode == 0, again.stdout + again.stderr
    for job in (done, again):
        assert "job       ddp-1n4g 123.pbs, on " in job.stdout
        assert "world size 4" in job.stdout
    assert Result(folder, []).column("step") == list(range(int(steps) + 5))


@pytest.mark.whole
@pytest.mark.parametrize(("name", "n"), [("std-1n1g", 1), ("mpi-1n4g", 4)])
def test_without_torchruns_names(clone, tmp_path, name, n):
    """std needs no launcher, and mpi asks its own. Open MPI binds nothing."""
    needs("mpiexec")
    done = run(clone, name, WORKSHOP_RUN=str(tmp_path / "run"),
               OMPI_MCA_hwloc_base_binding_policy="core:overload-allowed",
               OMPI_MCA_hwloc_base_report_bindings="1",
               FLAGS=f"{FLAGS} --max-steps 3")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "run" / "hyperparameters.json").read_text())
    assert said["world_size"] == n
    assert done.stderr.count(" is not bound (") == (n if n > 1 else 0)


def test_open_mpi_sends_other_nodes_the_settings(clone, tmp_path):
    """Of what it is started with, that which `launch` sends as well."""
    program(tmp_path / "mpiexec", (
        "#!/bin/sh\nif [ $1 = --version ]; then echo Open MPI; exit; fi\n"
        f"env -0 | cut -zd= -f1 | tr '\\0' '\\n' > '{tmp_path}/names'\n"))
    settings = {"GLOO_SOCKET_IFNAME": "lo", "LD_LIBRARY_PATH": "/opt/lib",
                "OMP_NUM_THREADS": "32", "WORKSHOP_DATA": str(GOLDEN),
                "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "HOSTNAME": "first",
                "CUDA_VISIBLE_DEVICES": "GPU-1"}  # a name on this node alone
    done = run(clone, "ddp-1n4g", bin=str(tmp_path), **settings)
    sent = re.findall(r" -x (\w+)", done.stdout)
    assert {*settings} - {*sent} == {"HOSTNAME", "CUDA_VISIBLE_DEVICES"}
    names = (tmp_path / "names").read_text().split()
    assert sorted(sent) == sorted(filter(launch.SENT.fullmatch, names))


@pytest.mark.whole
@pytest.mark.parametrize(("variables", "words"), [
    ({"nodes": "nowhere.invalid\n"}, "names nowhere.invalid, which is no "),
    ({"PBS_NODEFILE": "/nowhere"}, "submit it with qsub"),
    ({"PBS_O_WORKDIR": "/nowhere"}, "/nowhere/batchfiles/pbs/job.sh"),
    ({"WORKSHOP_DATA": "/nowhere"}, "fix site.sh"),
    ({"WORKSHOP_RUN": "/nowhere", "mpiexec": "exit 1"},
     "stopped and not continued: no further step was saved"),
    # as qdel does: the job's shell gets the signal, too
    ({"WORKSHOP_RUN": "/nowhere", "mpiexec": "kill $PPID; sleep 1; exit 1"},
     "ended by qdel, or by PBS at the time limit; go on after 0 steps")])
def test_what_is_wrong_is_one_line(clone, tmp_path, variables, words):
    if "mpiexec" in variables:
        variables = dict(variables)
        program(tmp_path / "mpiexec",
                f"#!/bin/sh\n{variables.pop('mpiexec')}\n")
    done = run(clone, "ddp-1n4g", bin=str(tmp_path), **variables)
    (line,) = (line for line in done.stderr.splitlines()
               if not line.startswith("script "))
    assert done.returncode == 1 and words in line
