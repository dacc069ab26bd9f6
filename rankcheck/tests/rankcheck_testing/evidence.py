"""Records that the ranks of jobs have left, and what `why` says of them.

    python tests/rankcheck_testing/evidence.py FOLDER NAME.jsonl

keeps what the ranks of a job have left in a folder, as `why` reads it now, for
test_what_is_said_of_a_job. Records that are kept are in tests/evidence, with a
table of what is said of each: said.md. While the job runs, its ranks are asked
where they are; of one that has ended, its last records are kept.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]

from rankcheck.engine.findings import Finding
from rankcheck.engine.ranks import free_port
from rankcheck.system.errors import UserError, require, show_path
from rankcheck.system.hook import HOOK
from rankcheck.system.sources import Sources
from rankcheck.why.evidence import collect, rename_keys
from rankcheck.why.judge import diagnose
from rankcheck.why.ranks import Rank
from rankcheck_testing.support import HOUSE, SOURCE_PATH, program, python

FOLDER = HOUSE / "tests" / "evidence"
MOST_CALLS = 4  # of a rank, the last ones


@dataclass(frozen=True)
class Said:
    """What `why` has to say of a job.

    Attributes:
        fault: "" for a sound job.
        blamed: the ranks, as in "1, 2".
        part: of the answer.
    """

    fault: str
    blamed: str
    part: str

    def check(self, found: Finding) -> None:
        """Fail if that is not the answer."""
        blamed = ", ".join(str(rank.rank) for rank in found.ranks)
        assert (found.kind, blamed) == (self.fault, self.blamed), found.text
        assert self.part in found.text


def read_said() -> dict[str, Said]:
    """Return what is to be said of each job that is kept, by its name."""
    jobs = {}
    for row in (FOLDER / "said.md").read_text().splitlines():
        if row.startswith("|"):
            name, *said = [cell.strip() for cell in row.split("|")[1:-1]]
            assert name not in jobs, (
                f"said.md has two rows for {name}; fix: rename one job")
            jobs[name] = Said(*said)
    del jobs["job"], jobs["---"]  # the table's head
    return jobs


def read_ranks(job: str, changed: int = 0, **changes: Any) -> list[Rank]:
    """Return the ranks of a job that is kept.

    Args:
        changes: of the record of the rank in the line `changed`.
    """
    lines = (FOLDER / f"{job}.jsonl").read_text().splitlines()
    ranks = [json.loads(line) for line in lines]
    for record, *_ in ranks:
        rename_keys(record)
    ranks[changed][0].update(changes)
    return [Rank(*rank) for rank in ranks]


def answer(folder: Path) -> Finding:
    """Return what `why` says of the job that leaves its records there."""
    return diagnose(collect(folder), lambda: collect(folder))


@dataclass(frozen=True)
class WatchedEnd:
    """How a script has ended that ran as a rank, and its records."""

    status: int
    records: list[dict[str, Any]]


def run_watched(folder: Path, text: str, *arguments: str,
                path: str = SOURCE_PATH, **variables: str) -> WatchedEnd:
    """Run this text as a rank, with the hook.

    Args:
        arguments: of Python, before the script.
        path: where it finds packages, besides the hook.
    """
    script = program(folder / "script.py", text)
    own = {"RANKCHECK_WHY": "why", "PYTHONPATH": f"{HOOK}:{path}"}
    end = python(folder, *arguments, script, **(own | variables))
    return WatchedEnd(end.returncode, [
        json.loads(file.read_text())
        for file in (folder / "why").glob("*.json")])


def check_end(folder: Path, last: str, status: int | None, error: str | None,
              path: str = SOURCE_PATH) -> None:
    """Fail if a rank's script whose last lines these are ends otherwise.

    Args:
        status: None where nobody in the process knows it.
        error: the type of the exception, which divides by zero.
    """
    end = run_watched(
        folder, f"import os, sys, colorsys\nos.chdir('/')\n{last}\n",
        path=path, RANK="0", WORLD_SIZE="2")
    record, = end.records
    assert record["ended"]["status"] == status
    assert status is None or end.status == status
    assert record["ended"].get("error") == error
    if error:  # where it was, and what it said
        line = Sources(None).find_line(record["ended"]["stack"])
        assert line and line[0].endswith("script.py")
        assert "zero" in record["ended"]["message"]


def join_alone() -> str:
    """Return lines by which a script joins a group of one rank."""
    return ("import torch.distributed as dist\n"
            "dist.init_process_group('gloo', "
            f"'tcp://127.0.0.1:{free_port()}', rank=0, world_size=1)\n")


def keep(folder: Path, file: Path) -> None:
    """Write a line for each rank: what it is made of, without this machine,
    and its last collectives.

    Raises `UserError` if no rank has left records in the folder.
    """
    ranks = collect(folder)
    require(ranks, f"no rank has left a record in {folder}; fix: name the "
            "folder that `rankcheck why run` has printed")
    lines = []
    for rank in ranks:
        record = {name: value for name, value in rank.record.items()
                  if name != "stack_samples"}
        record["calls"] = [
            {name: value for name, value in call.items() if name != "of"}
            for call in (rank.calls or [])[-MOST_CALLS:]]
        record["work"] = [work for work in rank.work if work[4] or work[5]]
        lines.append(json.dumps([record, rank.alive, rank.has_answered,
                                 rank.stack_dump]))
    file.write_text(hide_machine("\n".join(lines)) + "\n")


def hide_machine(text: str) -> str:
    """Return records with other names for this machine and its folders."""
    folders = set()
    for script in re.findall(r'"(/[^"]*\.py)", \d+, "<module>"', text):
        if not script.startswith(sys.prefix):
            folders.add(str(Path(script).parent))
    for folder in sorted(folders, key=len):
        text = text.replace(folder, "/home/me")
    text = text.replace(sys.prefix, "/venv")
    if len(Path(sys.base_prefix).parts) > 2:  # not /usr
        text = text.replace(sys.base_prefix, "/python")
    text = text.replace(str(HOUSE.parent), "/clone")
    return text.replace(f'"{socket.gethostname()}"', '"node1"')


def main(arguments: list[str]) -> None:
    """Keep a job's records, and print what is to be done next."""
    require(len(arguments) == 2 and arguments[1].endswith(".jsonl"),
            "invalid arguments; fix: evidence.py FOLDER NAME.jsonl")
    folder, file = map(Path, arguments)
    keep(folder, file)
    print(f"{file} is written; next: add a row for {file.stem} to "
          f"{show_path(FOLDER / 'said.md')}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
