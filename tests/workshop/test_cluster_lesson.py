"""notebooks/cluster.ipynb in a real JupyterLab, with a cluster of its own."""

import json
import os
import re
import shutil
import sys
import time

import pytest
from cluster import clone_course, needs_namespaces
from conftest import commit_all, needs, program, read_book
from lab import Lesson

from backstage import ROOT
from workshop.cluster.processes import find_processes
from workshop.cluster.settings import ClusterSettings, find_cluster_folder
from workshop.results.runs import read_run

# A file for the time of each cell. If it is named, the jobs are as long as the
# lesson's: that takes as many minutes as the lesson says.
TIMES = os.environ.get("LESSON_TIMES")
# Otherwise they are shorter; a node dies in mid-run, as there
SHORTER = (("--max-steps 200", "--max-steps 60"),
           ("--max-steps 40", "--max-steps 4 --preset tiny"),
           ("--max-steps 20", "--max-steps 4 --preset tiny"),
           ("--checkpoint-every 50", "--checkpoint-every 10"),
           ("| step   60/", "| step   25/"))
STEPS, KILLED_AT = (200, 60) if TIMES else (60, 25)


def make_clone(folder):
    """A clone in which the lesson can be opened; the ids of its cells."""
    clone_course(folder)
    demo = folder / "fineweb" / "demo"
    shutil.rmtree(demo)
    shutil.copytree(ROOT / "fineweb" / "demo", demo)
    (folder / "site.sh").write_text(f"WORKSHOP_VENV='{sys.prefix}'\n")
    file = folder / "notebooks" / "cluster.ipynb"
    text = file.read_text()
    for long, short in SHORTER:
        assert long in text, long
        if not TIMES:
            text = text.replace(long, short)
    file.write_text(text)
    commit_all(folder)
    return [cell.id for cell in read_book(file).cells
            if cell.cell_type == "code"]


def test_the_lesson(tmp_path, lab, page):
    """From the first cell to the last: what each shows, and what is left."""
    needs("slurmctld", "munged", "git", "pkill")
    needs_namespaces()
    repo, place = tmp_path / "repo", find_cluster_folder("main")
    ids = make_clone(repo)
    lesson = Lesson(page, lab(repo, all_cells=True), "cluster")
    cells = page.locator(".jp-NotebookPanel:visible .jp-CodeCell")
    shots, said = os.environ.get("SCREENSHOTS"), {}
    try:
        for number, name in enumerate(ids):
            name, begin = name.removeprefix("cluster-"), time.monotonic()
            said[name] = lesson.run_cell(cells.nth(number), timeout=900)
            note_time(name, time.monotonic() - begin)
            if shots:
                page.screenshot(path=f"{shots}/{number:02}-{name}.png")
        assert not find_processes(place) and not place.folder.exists()
        lesson.fits()
    finally:
        if find_processes(place):
            from workshop.cluster.control import Cluster

            Cluster(place).down()
    look_at(said, repo)


def note_time(cell, seconds):
    """Write how long a cell has taken."""
    if TIMES:
        with open(TIMES, "a") as file:
            file.write(f"{seconds:6.1f} s  {cell}\n")


def look_at(said, repo):
    """What the cells have shown is what the answers in the lesson say."""
    assert said["up"].count("idle") == 3
    for name in "submit", "two", "limit":
        assert re.search(r"Submitted batch job \d+", said[name]), said[name]
    for name in "watch", "two-watch", "node-end":
        assert "finished: " in said[name], said[name]
    assert "lit-2n2g" in said["queue"]
    for name in "limit-watch", "node-watch":
        assert "resuming after step" in said[name], said[name]
        assert "start 2" in said[name], said[name]
    assert "requeueing, to continue" in said["limit-watch"]
    assert f"| step {KILLED_AT:4}/" in said["node"]
    assert re.search(r"node2\s+NO", said["node"]), said["node"]
    assert "node[1,3]" in said["node-watch"]
    differ, = re.findall(rf"Of {STEPS} steps, the losses differ by (\S+) at "
                         "most", said["difference"])
    assert float(differ) < 1e-5
    assert re.search(r"node2\s+yes\s+(idle|mixed)", said["node-start"])
    # each element has a run
    assert len([*(repo / "runs").glob("std-*_[123]")]) == 3
    # ranks that have waited for other times are named apart, perhaps each
    assert re.search("waits? in all_reduce, ", said["why"]), said["why"]
    assert "rank 3 has not answered" in said["why"], said["why"]
    assert "No cluster is up" in said["down"]
    # the run that was started twice; whether it had steps to drop is chance
    second_start, = (repo / "runs").glob("ddp-2n2g-*/why/*-1")
    run = read_run(second_start.parent.parent)
    assert [row["step"] for row in run.rows] == [*range(STEPS)]
    record = json.loads((run.folder / "hyperparameters.json").read_text())
    assert record["world_size"] == 4


def test_a_sites_slurm_needs_no_cluster(monkeypatch, tmp_path):
    """Where no cluster of this machine's can be, for its folder's name."""
    from workshop.notebook import cells

    monkeypatch.setenv("TMPDIR", f"/scratch/{'long' * 20}")
    program(tmp_path / "sbatch", "#!/bin/sh\necho slurm 30.1\n")
    program(tmp_path / "squeue", "#!/bin/sh\necho no jobs\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cells.queue().text == "no jobs"
    assert "too long" in cells.cluster("up").text


def test_a_notebook_gets_a_sites_slurm_back(monkeypatch):
    """After `down`, it has the configuration that it had before."""
    from workshop.notebook import cluster

    needs("slurmctld", "munged")
    needs_namespaces()
    monkeypatch.setenv("SLURM_CONF", "/site/slurm.conf")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    own, path = cluster.own_cluster(), os.environ["PATH"]
    own.up(ClusterSettings(nodes=1))
    try:
        assert cluster.use_cluster() and cluster.use_cluster()
        assert os.environ["SLURM_CONF"] == str(own.place.config)
    finally:
        own.down()
    assert not cluster.use_cluster()
    assert os.environ["SLURM_CONF"] == "/site/slurm.conf"
    assert os.environ["PATH"] == path
    assert cluster.SITE_CONF not in os.environ


@pytest.mark.parametrize("call", [
    "cluster('on')", "cluster('kill', 'node9')", "watch()", "watch('a', 'b')",
    "freeze()", "why_job()", "cancel()", "difference('std', 'no')"])
def test_a_cell_without_a_cluster_says_so_in_a_line(call, monkeypatch):
    from workshop.notebook import cells
    from workshop.notebook.output import COMPLAINT

    monkeypatch.delenv("SLURM_CONF", raising=False)
    text = eval(call, vars(cells)).more[COMPLAINT]
    assert text and "\n" not in text and len(text) < 200
