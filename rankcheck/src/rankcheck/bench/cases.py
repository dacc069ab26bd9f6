"""The cases of the fault bench: a registry, and two scripts for each.

The cases are data. They are in the source, in the folder `bench`, and not in
the wheel: `find_folder` says where they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rankcheck.system.errors import UserError

# Of registry.json: another number if a field changes or goes
REGISTRY_SCHEMA = 1
REGISTRY = "registry.json"
SILENT, HANG = "silent", "hang"
KINDS: Mapping[str, tuple[str, ...]] = {
    SILENT: (
        "data", "gradients", "normalisation", "optimizer and schedule",
        "sharding", "precision", "RNG", "checkpoint and resume", "files"),
    HANG: (
        "collective mismatch", "deadlock", "early exit", "exception",
        "signal", "rendezvous", "straggler", "I/O", "launcher")}
Twin = Literal["wrong", "right"]
TWINS: tuple[Twin, ...] = ("wrong", "right")


@dataclass(frozen=True)
class PublicReport:
    """The issue or pull request that a case follows."""

    repository: str
    number: int

    def __str__(self) -> str:
        return f"{self.repository}#{self.number}"


@dataclass(frozen=True)
class Case:
    """A fault: a wrong script, its right twin, and what names the fault.

    Attributes:
        name: the name of its folder.
        group: "silent" for a silent error, "hang" for a hang or a death.
        kind: one of the group's `KINDS`.
        report: the public report that it follows.
        fault: what is wrong, in a sentence.
        answer: what a right answer has to name.
        kinds: the kinds of a tool's finding that name it, where the tool's
            document has kinds: then no word is looked at for the kind.
        ranks: the ranks that are at fault, in the same way; empty: all, or
            the place is another one.
        names: regular expressions; a statement that names the fault matches
            all of them, first the kind, then the place.
        follows: regular expressions; a statement that matches one of them
            is true of the wrong script, but not its cause.
        processes: the number of ranks.
        nodes: on so many nodes they believe they are.
        flags: the scripts' own; {run} becomes a name for each run.
        resume: the further flags of a resumed run; empty: it is not resumed.
        needs: packages besides torch.
        launch: "torchrun", or "python" for a script that starts its ranks.
        hashes: whether each rank needs string hashes of its own.
        held_out: whether rankcheck was never changed with it in view.
        folder: where its scripts are.
    """

    name: str
    group: str
    kind: str
    report: PublicReport
    fault: str
    answer: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    follows: tuple[str, ...]
    processes: int
    nodes: int
    flags: tuple[str, ...]
    resume: tuple[str, ...]
    needs: tuple[str, ...]
    launch: str
    hashes: bool
    held_out: bool
    folder: Path = field(compare=False)

    def script(self, twin: Twin) -> Path:
        """Return the file of one of its two scripts."""
        return self.folder / f"{twin}.py"


TEXTS = ("name", "group", "kind", "fault", "answer", "launch")
LAUNCHERS = ("torchrun", "python")
LISTS = ("kinds", "names", "follows", "flags", "resume", "needs")
NUMBERS = ("processes", "nodes")
FLAGS = ("hashes", "held_out")
FIELDS = tuple(one.name for one in fields(Case) if one.name != "folder")


def find_folder(given: str | None = None) -> Path:
    """Return the folder of the cases.

    Args:
        given: a folder that the user has named.

    Raises:
        UserError: if no registry is there.
    """
    folder = Path(__file__).resolve().parents[3] / "bench"
    if given is not None:
        folder = Path(given)
    if not (folder / REGISTRY).is_file():
        raise UserError(
            f"{folder} has no {REGISTRY}: an installed package has no cases. "
            "fix: clone the repository, and name the folder by --cases "
            "CLONE/rankcheck/bench")
    return folder


def load_cases(folder: Path) -> list[Case]:
    """Return all cases of a registry.

    Raises:
        UserError: if the registry does not have this schema, or an entry is
            not complete.
    """
    file = folder / REGISTRY
    try:
        document = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}; fix: restore it from "
                        "the repository") from None
    if not (isinstance(document, dict)
            and document.get("schema") == REGISTRY_SCHEMA):
        raise UserError(f"{file} does not have schema {REGISTRY_SCHEMA}; fix: "
                        "use the cases of the same version as rankcheck")
    cases = [read_case(entry, folder) for entry in document["cases"]]
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    expect(not twice, f"{', '.join(twice)}: there twice")
    return cases


def read_case(entry: Any, folder: Path) -> Case:
    """Return a case from its entry in the registry."""
    expect(isinstance(entry, dict), f"{entry!r} is no entry")
    name = str(entry.get("name"))
    for missing in sorted(set(FIELDS) - entry.keys()):
        expect(False, f"{name} has no {missing}")
    for unknown in sorted(entry.keys() - set(FIELDS)):
        expect(False, f"{name} has {unknown}, which is no field")
    for key in TEXTS:
        is_text = isinstance(entry[key], str) and entry[key].strip()
        expect(bool(is_text), f"{name}: {key} is no text")
    for key in LISTS:
        is_list = isinstance(entry[key], list) and all(
            isinstance(one, str) for one in entry[key])
        expect(is_list, f"{name}: {key} is no list of texts")
    are_ranks = isinstance(entry["ranks"], list) and all(
        type(one) is int and one >= 0 for one in entry["ranks"])
    expect(are_ranks, f"{name}: ranks is no list of ranks")
    for key in NUMBERS:
        is_number = type(entry[key]) is int and entry[key] > 0
        expect(is_number, f"{name}: {key} is no number of 1 or more")
    for key in FLAGS:
        expect(isinstance(entry[key], bool), f"{name}: {key} is not true "
               "or false")
    group, kind = entry["group"], entry["kind"]
    expect(kind in KINDS.get(group, ()), f"{name}: {kind} is no kind of "
           f"the group {group}")
    expect(bool(entry["names"]), f"{name}: names is empty")
    expect(entry["launch"] in LAUNCHERS, f"{name}: {entry['launch']} is no "
           "launcher")
    expect(entry["processes"] % entry["nodes"] == 0, f"{name}: its "
           "processes cannot be divided among its nodes")
    case = Case(
        name=name, group=group, kind=kind,
        report=read_report(name, entry["report"]), fault=entry["fault"],
        answer=entry["answer"], kinds=tuple(entry["kinds"]),
        ranks=tuple(entry["ranks"]), names=tuple(entry["names"]),
        follows=tuple(entry["follows"]), processes=entry["processes"],
        nodes=entry["nodes"], flags=tuple(entry["flags"]),
        resume=tuple(entry["resume"]), needs=tuple(entry["needs"]),
        launch=entry["launch"], hashes=entry["hashes"],
        held_out=entry["held_out"],
        folder=folder / "cases" / name)
    for twin in TWINS:
        expect(case.script(twin).is_file(), f"{name} has no {twin}.py")
    return case


def read_report(name: str, entry: Any) -> PublicReport:
    """Return a public report from its part of an entry."""
    is_whole = isinstance(entry, dict) and entry.keys() == {
        "repository", "number"}
    expect(is_whole, f"{name}: report is not a repository and a number")
    repository, number = entry["repository"], entry["number"]
    is_repository = isinstance(repository, str) and (
        repository.count("/") == 1)
    expect(is_repository, f"{name}: {repository!r} is no owner/name")
    expect(type(number) is int and number > 0, f"{name}: {number!r} is no "
           "number of an issue")
    return PublicReport(repository, number)


def expect(holds: bool, problem: str) -> None:
    """Raise an error about the registry unless something holds."""
    if not holds:
        raise UserError(f"{REGISTRY}: {problem}; fix: docs/bench.md "
                        "describes the fields")


def select(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Return the cases that are named: by name, kind or group; or all.

    Raises:
        UserError: a name is of no case, kind or group.
    """
    found: list[Case] = []
    for name in names:
        named = [case for case in cases
                 if name in (case.name, case.kind, case.group)]
        if not named:
            raise UserError(f"no case is called {name}; fix: `python -m "
                            "rankcheck.bench --list` shows them")
        found += [case for case in named if case not in found]
    return found if names else [*cases]
