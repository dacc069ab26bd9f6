"""How far the class is: python -m workshop class FOLDER

An attendee who sets WORKSHOP_CLASS to a shared folder takes part: `diff` and
`check` then add a line to a file there. The instructor projects a page that
shows all of them, without names. Nothing is written for anyone else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from backstage import ROOT
from backstage.errors import UserError, require
from backstage.files import StrPath, require_like, write_atomically
from rankcheck.system.errors import read_regular
from workshop.diff import documents
from workshop.diff.diff import Diff
from workshop.diff.page import PAGE_FOLDER, quote
from workshop.html import BLUE, ORANGE, may_replace
from workshop.stages import LESSONS, STAGES, batch_files

# Nobody waits for it: the folder may be full, gone, or on a server that does
# not answer. It makes no folder, and writes into no link and no FIFO, which
# anybody may have put there.
WRITE = """import os, stat, sys
os.umask(0o022)
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT
               | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
found = os.fstat(file)
if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
    os.write(file, sys.argv[2].encode() + b"\\n")
"""
LARGEST_FILE = 1_000_000  # bytes of a file: anybody may write there
LONG = 300  # seconds without a further change: somebody may need help
REFRESH = 5  # seconds from one page to the next

CLASS_MARK = "made by python -m workshop class, which replaces it"


# ---------------------------------------------------------------- attendees


def note_progress(stage: str, **what: Any) -> None:
    """Add a line to this attendee's file in the class folder, if any."""
    folder = os.environ.get("WORKSHOP_CLASS")
    if not folder:
        return
    line = json.dumps({"stage": stage, "time": time.time(), **what})
    file = Path(folder, f"{my_name()}.jsonl")
    with suppress(OSError):
        subprocess.run(["sh", "-c", '"$@" &', "sh", sys.executable, "-IS",
                        "-c", WRITE, file, line], check=False,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)


def note_diff(diff: Diff) -> None:
    note_progress(diff.stage, left=[item.number for item in diff.remaining])


def my_name() -> str:
    """The same at each call in this clone, and no name."""
    return hashlib.sha256(f"{os.getuid()} {ROOT}".encode()).hexdigest()[:12]


# --------------------------------------------------------------- instructor


@dataclass
class Person:
    """What is known about an attendee who takes part."""

    stage: str  # of the lesson
    left: list[int]  # the numbers of the changes that are left
    since: float  # when this last changed, in seconds since 1970
    right: bool | None  # the last check's answer, None before the first
    mistake: str  # the question that it was about


def read_people(folder: StrPath) -> list[Person]:
    """A `Person` for each file that has a line which can be read."""
    people = []
    for file in sorted(Path(folder).glob("*.jsonl")):
        with suppress(OSError):
            data = read_regular(file, LARGEST_FILE + 1, os.O_NOFOLLOW)
            lines = [*read_lines(data.decode("utf-8", "replace"))]
            if lines and len(data) <= LARGEST_FILE:
                people.append(summarise(lines))
    return people


def read_lines(text: str) -> Iterator[dict[str, Any]]:
    """The lines that are whole, and as `note_progress` writes them."""
    for line in text.splitlines():
        with suppress(ValueError, RecursionError, TypeError, UserError):
            event = json.loads(line)
            require_like({"left": [], "right": True, "mistake": ""} | event, {
                "stage": Literal[LESSONS], "time": float, "left": list,
                "right": bool, "mistake": str})
            if 0 <= event["time"] < 1e11:  # false for nan
                yield event


def summarise(lines: list[dict[str, Any]]) -> Person:
    """Summarise an attendee's lines about their current lesson."""
    lines.sort(key=lambda line: line["time"])
    stage = lines[-1]["stage"]
    lines = [line for line in lines if line["stage"] == stage]
    left = changes = [*range(1, 1 + len(documents.load_changes(stage)))]
    since, right, mistake = lines[0]["time"], None, ""
    for line in lines:
        if "right" in line:
            right, mistake = line["right"], line.get("mistake", "")[:100]
        now = [number for number in changes if not line.get("right")
               and number in line.get("left", left)]
        if now != left:
            left, since = now, line["time"]
    return Person(stage, left, since, right, mistake)


def draw_page(people: list[Person], jobs: str, now: float) -> str:
    """The page: a row for each person, those with the most changes first; and
    how many people each change is the next one of.

    jobs: a line about them, or "". now: seconds since 1970.
    """
    from jinja2 import Template  # which a portal's kernel does not have

    lessons = []
    for stage in LESSONS:
        here = [person for person in people if person.stage == stage]
        at = Counter(person.left[0] for person in here if person.left)
        if here:
            lessons.append((
                STAGES[stage].title, documents.load_changes(stage),
                sorted(here, key=lambda person: len(person.left)),
                sorted(at.items())))
    mistakes = Counter(person.mistake for person in people if person.mistake)
    page = Template((PAGE_FOLDER / "class.html").read_text("utf-8"),
                    autoescape=True,
                    trim_blocks=True)
    return page.render(
        mark=CLASS_MARK, every=REFRESH, blue=BLUE, orange=ORANGE,
        people=people,
        passed=sum(person.right is True for person in people),
        waiting=sum(is_long(person, now) for person in people),
        minutes=LONG // 60, mistakes=mistakes.most_common(1), jobs=jobs,
        lessons=lessons, quote=quote, describe=describe_person, now=now,
        when=time.strftime("%H:%M:%S", time.localtime(now)))


def is_long(person: Person, now: float) -> bool:
    """Whether somebody waits: also with all changes, if they are not right."""
    return not person.right and now - person.since > LONG


def describe_person(person: Person, now: float) -> str:
    """Return the text at the end of a row."""
    if person.right:
        return "right"
    parts = ["not right yet"] if person.right is False else []
    if is_long(person, now):
        parts.append(f"{(now - person.since) / 60:.0f} min")
    return ", ".join(parts)


def count_jobs() -> str:
    """The course's jobs in the queue, in a line; "" where there is no SLURM.
    """
    if not shutil.which("squeue"):
        return ""
    try:
        queue = subprocess.run(["squeue", "-h", "-o", "%T %j"], text=True,
                               capture_output=True, check=True,
                               timeout=REFRESH)
    except (OSError, subprocess.SubprocessError):
        return ""
    jobs = (line.partition(" ") for line in queue.stdout.splitlines())
    names = batch_files()
    states = Counter(state for state, _, name in jobs if name in names)
    return (f"Jobs: {states['PENDING']} waiting in the queue, "
            f"{states['RUNNING']} running.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="the shared one that WORKSHOP_CLASS "
                        "names")
    parser.add_argument("-o", "--output", default="class.html",
                        help="the page (class.html)")


def main(args: argparse.Namespace) -> NoReturn:
    """Write the page again and again, until Ctrl-C."""
    folder, output = args.folder, args.output
    require(Path(folder).is_dir(), f"{folder} is not a folder; fix: make it "
            f"with `mkdir -m 1777 {folder}`, and name it in site.sh")
    print(f"open {output} in a browser: it is updated every {REFRESH} "
          "seconds, until Ctrl-C", flush=True)
    while True:
        page = draw_page(read_people(folder), count_jobs(), time.time())
        require(may_replace(output, CLASS_MARK), f"{output} exists and was "
                "not made by class; fix: choose another page with -o")
        write_atomically(output, page.encode(errors="replace"))
        time.sleep(REFRESH)
