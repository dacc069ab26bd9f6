"""The stage 3d does not hang where every message waits for its other side.

NCCL may keep a send until its receiver has come; gloo never does, so a run on
a CPU cannot see it. Here the orders of a rank's messages are those of
PyTorch's schedule, and a model says whether all of them end.
"""

from collections import defaultdict
from itertools import product

import pytest
from torch.distributed.pipelining import schedules

DP = TP = 2


class Rank:
    """A rank that notes what the schedule asks of it, in `order`.

    It stands in the place of a PipelineStage. place: its position in the mesh
    (stage, dp, tp). What it notes is ("messages", [("send" or "recv", place of
    the other rank)]), ("wait", [which of its notes are the messages]) or
    ("together", places of all who take part).
    """

    def __init__(self, place, num_stages, training):
        self.place, self.num_stages = place, num_stages
        self.stage_index, self.dp, self.tp = place
        self.is_last = self.stage_index == num_stages - 1
        self.training, self.order = training, []

    def talk(self, kind, step):
        """The messages to the stage after (1) or before this one (-1)."""
        stage = self.stage_index + step
        return [(kind, (stage, self.dp, self.tp))] * (
            0 <= stage < self.num_stages)

    def get_fwd_recv_ops(self, i):
        return self.talk("recv", -1)

    def get_fwd_send_ops(self, i):
        return self.talk("send", 1)

    def get_bwd_recv_ops(self, i):
        return self.talk("recv", 1) * self.training

    def get_bwd_send_ops(self, i):
        return self.talk("send", -1) * self.training

    def meet(self, *dimensions):
        """Collectives of FSDP's or TP's group, one after the other."""
        for dimension in dimensions:
            self.order.append(("together", tuple(
                (self.stage_index, i, self.tp) if dimension == "dp" else
                (self.stage_index, self.dp, i) for i in range(2))))

    def forward_one_chunk(self, *args, **options):
        self.meet("dp", "tp", "tp")  # gather a block; attention and MLP

    def backward_one_chunk(self, i, loss, last_backward):
        if self.training:
            self.meet("dp", "tp", "tp", *["dp"] * last_backward)

    def perform_reduce_grad(self, scale):
        """Nothing is left to do: FSDP has reduced them."""


def record(ranks, num_microbatches, monkeypatch):
    """Let PyTorch's schedule tell each rank what to do in a step."""
    for rank in ranks:
        def start(ops, desc=None, rank=rank):
            rank.order.append(("messages", ops))
            return [len(rank.order) - 1]

        def wait(numbers, rank=rank):
            rank.order.append(("wait", numbers))

        monkeypatch.setattr(schedules, "_batch_p2p", start)
        monkeypatch.setattr(schedules, "_wait_batch_p2p", wait)
        schedule = schedules.Schedule1F1B(
            rank, num_microbatches, lambda output, target: 0)
        monkeypatch.setattr(schedule, "_initialize_stage", lambda *_: None)
        schedule._step_microbatches(
            target_mbs=[None] * num_microbatches, losses=[])
        everybody = tuple(other.place for other in ranks)
        pipeline = tuple(place for place in everybody
                         if place[1:] == rank.place[1:])
        for group in (pipeline, pipeline[::len(pipeline) - 1], everybody):
            if rank.place in group:  # the loss, the tied ends, the norm
                rank.order.append(("together", group))


def unfinished(ranks, communicator):
    """How many messages and meetings never end.

    All messages of a communicator go one after the other. They begin when the
    computing that they follow is done, and end when their other sides have
    begun. A rank's computing goes on at a wait when its messages have ended,
    and at a meeting when all have come.
    """
    before, sides, last = {}, defaultdict(list), {}
    for rank in ranks:
        counts, computing = defaultdict(int), None
        for number, (kind, what) in enumerate(rank.order):
            me = rank.place, number
            before[me] = {computing} - {None}
            if kind == "messages":
                for direction, other in what:
                    ends = (rank.place, other)
                    if direction == "recv":
                        ends = ends[::-1]
                    lane = communicator(what, ends)
                    if previous := last.get((rank.place, lane)):
                        before[me].add(previous)
                    last[rank.place, lane] = me
                    counts[lane, ends] += 1
                    sides[lane, ends, counts[lane, ends]].append(me)
                before[me].discard(me)
                continue
            if kind == "wait":
                before[me] |= {(rank.place, message) for message in what}
            else:
                counts[what] += 1
                sides[what, counts[what]].append(me)
            computing = me
    partners = {me: {me} for me in before}
    for meeting, present in sides.items():
        size = len(meeting[0]) if len(meeting) == 2 else 2
        for me in present:  # "nobody" never comes
            partners[me] |= {*present} if len(present) == size else {"nobody"}
    return len(before) - len(play(before, partners))


def play(before, partners):
    """What ends, of what begins after `before` and needs its partners."""
    after, left = defaultdict(list), {}
    for me, needed in before.items():
        left[me] = len(needed)
        for one in needed:
            after[one].append(me)
    ready, begun, ended = [me for me in before if not left[me]], set(), set()
    while ready:
        begun.add(ready[-1])
        for me in (partners[ready.pop()] & begun) - ended:
            if partners[me] <= begun:
                ended.add(me)
                for follower in after[me]:
                    left[follower] -= 1
                    if not left[follower]:
                        ready.append(follower)
    return ended


COMMUNICATORS = {  # of which messages go one after the other
    "one of all": lambda ops, ends: "all",
    "one of each pair": lambda ops, ends: frozenset(ends),
    # several at once by that of all, a single one by that of the pair
    "as PyTorch does": lambda ops, ends: (
        "all" if len(ops) > 1 else frozenset(ends))}


@pytest.mark.parametrize("communicator", COMMUNICATORS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_stages", range(2, 7))
def test_no_rank_waits_for_ever(
        num_stages, training, communicator, monkeypatch):
    for num_microbatches in range(num_stages, 13):
        ranks = [Rank(place, num_stages, training) for place in product(
            range(num_stages), range(DP), range(TP))]
        record(ranks, num_microbatches, monkeypatch)
        assert unfinished(ranks, COMMUNICATORS[communicator]) == 0


def make(monkeypatch):
    ranks = [Rank(place, 2, True) for place in product(
        range(2), range(DP), range(TP))]
    record(ranks, 4, monkeypatch)
    return ranks


def split(kind, what):
    """Each message by itself, in the place of those that go at once."""
    return [(kind, [op]) for op in what] if kind == "messages" else [
        (kind, what)]


def test_the_model_sees_who_sends_first_on_both_sides(monkeypatch):
    for separately in (False, True):
        ranks = make(monkeypatch)
        for rank in ranks:  # a wait would name them by their old numbers
            rank.order = [new for item in rank.order if item[0] != "wait"
                          for new in (split(*item) if separately else [item])]
        assert bool(unfinished(
            ranks, COMMUNICATORS["one of all"])) == separately
