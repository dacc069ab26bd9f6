"""Which rank waits for which: the proof that ranks can never continue.

A rank that is idle may wait for a download or slow storage: that proves
nothing. What proves a hang is that each of some ranks waits, in a collective
or a message, for a rank that has ended or that waits for ever itself. `verify`
knows for whom a rank waits from what its probes record, `why` from the flight
recorder; both ask here what follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

Waiter = TypeVar("Waiter")  # a rank, or its number


def find_stuck(waits: Mapping[Waiter, Collection[Waiter]],
               ended: Collection[Waiter] = ()) -> set[Waiter]:
    """Return the ranks that can never continue.

    Args:
        waits: for whom a rank waits. Each of them has to come before it goes
            on. A rank that waits for nobody is left out, or has nobody here.
        ended: the ranks that have ended, and come no more.
    """
    stuck = {rank for rank, awaited in waits.items() if awaited}
    while True:
        free = {rank for rank in stuck
                if not any(other in stuck or other in ended
                           for other in waits[rank])}
        if not free:
            return stuck
        stuck -= free


def find_cycle(waits: Mapping[Waiter, Sequence[Waiter]]) -> list[Waiter]:
    """Return the shortest circle of ranks each of which waits for the next;
    [] if there is none.

    There is one exactly where ranks are stuck though none has ended.

    Args:
        waits: see `find_stuck`; each rank that is waited for has a key.
    """
    shortest: list[Waiter] = []
    for first in waits:
        cycle = find_way_back(first, waits)
        if cycle and (not shortest or len(cycle) < len(shortest)):
            shortest = cycle
        if len(shortest) == 2:
            break  # there is no shorter one
    return shortest


def find_way_back(first: Waiter,
                  waits: Mapping[Waiter, Sequence[Waiter]]) -> list[Waiter]:
    """Return the shortest way from a rank to itself, itself first; [] without
    one.
    """
    ways, reached = {first: [first]}, [first]
    for rank in reached:  # which grows: the nearest ones first
        for other in waits[rank]:
            if other == first:
                return ways[rank]
            if other not in ways:
                ways[other] = [*ways[rank], other]
                reached.append(other)
    return []
