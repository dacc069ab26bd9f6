"""Which ranks can never go on, by who waits for whom."""

import random

import pytest

from rankcheck.engine.waits import find_cycle, find_stuck


@pytest.mark.parametrize(("waits", "ended", "stuck"), [
    ({}, [], []),
    ({0: [1]}, [], []),  # 1 computes, and may come
    ({0: [1]}, [1], [0]),
    ({0: [1], 1: [2]}, [2], [0, 1]),
    ({0: [1], 1: [0]}, [], [0, 1]),
    ({0: [1], 1: [0], 2: [0], 3: [4]}, [], [0, 1, 2]),
    ({0: [1, 2], 1: [0]}, [], [0, 1]),  # 2 comes, 1 does not
    ({0: [1], 1: []}, [], []),
    ({0: [1], 1: [2], 2: [0], 3: [3]}, [], [0, 1, 2, 3])])
def test_who_can_never_go_on(waits, ended, stuck):
    assert find_stuck(waits, ended) == {*stuck}


@pytest.mark.parametrize(("waits", "cycle"), [
    ({0: [1], 1: []}, []),
    ({0: [1], 1: [2], 2: [1]}, [1, 2]),
    ({0: [1], 1: [2], 2: [0]}, [0, 1, 2]),
    ({0: [1], 1: [2, 3], 2: [0], 3: [1]}, [1, 3])])
def test_the_shortest_circle(waits, cycle):
    assert find_cycle(waits) == cycle


def test_ranks_are_stuck_where_there_is_a_circle():
    """As long as none has ended: each of them leads to a circle."""
    draw = random.Random(0)
    found = []
    for _ in range(500):
        size = draw.randrange(1, 7)
        waits = {rank: [other for other in range(size) if other != rank
                        and draw.random() < 0.2] for rank in range(size)}
        found.append(bool(find_cycle(waits)))
        assert found[-1] == bool(find_stuck(waits)), waits
    assert 100 < sum(found) < 400  # some of each
