"""What the lesson sharding measures with: pipelines and meshes."""

import itertools
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import parallelize_module

from notebooks.experiments.sharding import Traffic, load

script = load("3d")


class Sleep(torch.autograd.Function):
    """Takes as long as it is told to, forwards and backwards."""

    @staticmethod
    def forward(ctx, x, work):
        ctx.work = work
        work.spend("F", work.seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.work.spend("B", ctx.work.seconds[1])
        return gradient, None


class Work(nn.Module):
    """A stage of a pipeline that sleeps, and notes when.

    events: [name, microbatch, begin, end], in seconds of the machine's clock.
    """

    def __init__(self, events):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.events = events

    def start(self, seconds):
        """Begin with microbatch 0; seconds: it takes forwards, backwards."""
        self.seconds, self.number = seconds, {"F": 0, "B": 0}

    def forward(self, x):
        return Sleep.apply(x * self.weight, self)

    def spend(self, name, seconds):
        begin = time.perf_counter()
        time.sleep(seconds)
        self.events.append(
            [name, self.number[name], begin, time.perf_counter()])
        self.number[name] += 1


def run_pipeline(Schedule, microbatches, forward, backward, chunks=1):
    """What this rank's stages do in a step of the schedule: their events.

    forward, backward: seconds that a rank takes for a microbatch. chunks: how
    many stages a rank has, which is more than one for interleaved schedules.
    The events are those of `Work`, in their order, from time 0 on.
    """
    rank, ranks, events = dist.get_rank(), dist.get_world_size(), []
    works = [Work(events) for _ in range(chunks)]
    stages = [PipelineStage(work, rank + i * ranks, chunks * ranks,
                            torch.device("cpu"))
              for i, work in enumerate(works)]
    schedule = Schedule(stages if chunks > 1 else stages[0], microbatches,
                        loss_fn=lambda y, target: (y - target).sum())
    x = torch.zeros(microbatches, 8)
    losses = []
    for seconds in ((0, 0), (forward / chunks, backward / chunks)):
        events.clear()  # of the first time, when it warms up
        for work in works:
            work.start(seconds)
        dist.barrier()
        schedule.step(*[x] if stages[0].is_first else [],
                      target=x if stages[-1].is_last else None, losses=losses)
    start = torch.tensor(events[0][2], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MIN)
    return [[name, number, begin - start.item(), end - start.item()]
            for name, number, begin, end in events]


def waited(events):
    """The share of the step in which the ranks waited, on average."""
    busy = torch.tensor(sum(end - begin for *_, begin, end in events),
                        dtype=torch.float64)
    dist.all_reduce(busy)
    end = torch.tensor(events[-1][3], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return 1 - busy.item() / dist.get_world_size() / end.item()


def in_flight(events):
    """The most microbatches that had gone forwards and not yet backwards."""
    return max(itertools.accumulate(
        1 if name == "F" else -1 for name, *_ in events), default=0)


def traffic_3d(pp, tp, accumulation_steps, B):
    """A step of the stage 3d: this rank's model, and a `Traffic`.

    The model is of preset tiny, with a vocabulary of 512 tokens; B: samples of
    a microbatch.
    """
    torch.manual_seed(0)
    mesh = dist.init_device_mesh(
        "cpu", (pp, dist.get_world_size() // pp // tp, tp),
        mesh_dim_names=("pp", "dp", "tp"))
    config = script.replace(script.MODELS["tiny"], vocab_size=512)
    model = script.GPT(config)
    script.split_vocabulary(model, mesh["tp"])
    script.cut(model, mesh["pp"])
    for block in model.transformer.h.children():
        parallelize_module(block, mesh["tp"], script.BLOCK_PLAN)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    cpu = torch.device("cpu")
    pipeline = script.Pipeline(model, accumulation_steps, cpu, mesh["pp"])
    batch = torch.randint(512, (2, accumulation_steps * B, 32))
    for _ in range(2):  # the first step sends more, to learn the shapes
        with Traffic() as traffic:
            script.training_step(pipeline, batch, cpu, "fp32")
    return model, traffic
