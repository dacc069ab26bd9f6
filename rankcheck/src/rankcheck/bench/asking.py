"""Asks tools about cases, several at once, each in a process of a pool."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NoReturn

from rankcheck.bench.cases import HANG, Case, Twin
from rankcheck.bench.choice import choose_tools
from rankcheck.bench.results import ResultRow
from rankcheck.bench.scoring import (
    Judgement,
    Score,
    Statement,
    ToolAnswer,
    score,
)
from rankcheck.bench.tools import Tool
from rankcheck.bench.twins import FOLDER, empty_folder
from rankcheck.system.errors import UserError

ENDED = 5.0  # seconds for a worker to end its jobs
HANGS_SHARE = 0.8  # of the list over which the hangs are spread


def try_out(tools: Sequence[Tool], cases: Sequence[Case], jobs: int
            ) -> Iterator[ResultRow]:
    """Ask tools about cases, several at once; yield each row when it is done.

    Cases of the two groups come by turns: about hangs a tool waits, about
    silent errors it computes.
    """
    context = multiprocessing.get_context("spawn")
    with empty_folder() as folder, ProcessPoolExecutor(
            jobs, mp_context=context, initializer=use_folder,
            initargs=(folder,)) as pool:
        waiting: list[Future[ResultRow]] = []
        try:
            for case in take_turns(cases):
                for tool in tools:  # the first start the workers: seconds
                    waiting.append(pool.submit(ask_tool, tool.name, case))
            for done in as_completed(waiting):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_workers()
            raise


def use_folder(folder: Path) -> None:
    """In a process of the pool: make all folders in that of the run."""
    os.environ[FOLDER] = str(folder)


def end_workers() -> None:
    """End the processes of the pool, and what they have started."""
    workers = multiprocessing.active_children()
    for end in (multiprocessing.process.BaseProcess.terminate,
                multiprocessing.process.BaseProcess.kill):
        for worker in workers:
            end(worker)
        for worker in workers:
            worker.join(ENDED)


def take_turns(cases: Sequence[Case]) -> list[Case]:
    """Return cases so that both groups are spread over the whole list.

    Hangs end sooner: one that begins last would be waited for alone.
    """
    places: list[tuple[float, Case]] = []
    for group in {case.group for case in cases}:
        some = [case for case in cases if case.group == group]
        share = HANGS_SHARE if group == HANG else 1.0
        for number, case in enumerate(some):
            places.append((share * number / len(some), case))
    return [case for _, case in sorted(places, key=lambda place: place[0])]


def ask_tool(name: str, case: Case) -> ResultRow:
    """In a process of the pool: ask a tool about a case."""
    signal.signal(signal.SIGTERM, exit_worker)
    [tool] = choose_tools([name])
    return try_case(tool, case)


def try_case(tool: Tool, case: Case) -> ResultRow:
    """Ask a tool about both scripts of a case, and score what it says."""
    reason = tool.why_not(case)
    if reason:
        return make_row(tool, case, Judgement(Score.NOT_APPLICABLE, reason),
                        ToolAnswer((), 0.0), ToolAnswer((), 0.0))
    wrong, right = ask_twin(tool, case, "wrong"), ask_twin(tool, case, "right")
    return make_row(tool, case, score(case, wrong, right), wrong, right)


def exit_worker(*_: object) -> NoReturn:
    """End this process, and by its exit handlers what it has started."""
    raise SystemExit(1)


def ask_twin(tool: Tool, case: Case, twin: Twin) -> ToolAnswer:
    """Ask a tool about one script; where it fails, it says nothing."""
    try:
        return tool.ask(case, twin)
    except UserError as error:
        problem = Statement(f"could not be run: {error}", is_problem=False)
        return ToolAnswer((problem,), 0.0)


def make_row(tool: Tool, case: Case, result: Judgement, wrong: ToolAnswer,
             right: ToolAnswer) -> ResultRow:
    """Return a row of the results."""
    return ResultRow(
        case=case.name, group=case.group, kind=case.kind,
        held_out=case.held_out, tool=tool.name, score=result.score.value,
        reason=result.reason, by_warning=result.by_warning,
        false_warnings=result.false_warnings,
        seconds=round(wrong.seconds + right.seconds, 1),
        wrong=[*wrong.statements], right=[*right.statements])
