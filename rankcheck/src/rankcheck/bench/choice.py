"""The tools of the bench, by their names."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rankcheck.bench.peers import FlightRecorder, SpmdTypes, TrainCheck
from rankcheck.bench.tools import (
    DebugDetail,
    LossCurve,
    PySpy,
    Rankcheck,
    Tool,
)
from rankcheck.system.errors import UserError

TOOLS: Sequence[Tool] = (
    Rankcheck(), LossCurve(), DebugDetail(), FlightRecorder(), PySpy(),
    TrainCheck(), SpmdTypes())


def choose_tools(names: Sequence[str]) -> list[Tool]:
    """Return the tools that are named, or all that are not slow.

    Raises:
        UserError: if there is no such tool.
    """
    known = {tool.name: tool for tool in TOOLS}
    for name in names:
        if name not in known:
            raise UserError(f"there is no tool {name}; fix: one of "
                            f"{', '.join(known)}")
    if names:
        return [known[name] for name in names]
    return [tool for tool in TOOLS if not tool.is_slow]


def choose_installed(names: Sequence[str]) -> list[Tool]:
    """Return the tools that are named, or all that are installed, not slow.

    Tools that are left out are named on stderr.

    Raises:
        UserError: if there is no such tool, or if it is not installed.
    """
    installed = []
    for tool in choose_tools(names):
        missing = " and ".join(tool.missing_programs())
        if not missing:
            installed.append(tool)
            continue
        if names:
            raise UserError(f"{tool.name} is not installed; fix: put "
                            f"{missing} on PATH")
        print(f"{tool.name} is left out: it is not installed (fix: put "
              f"{missing} on PATH)", file=sys.stderr)
    return installed
