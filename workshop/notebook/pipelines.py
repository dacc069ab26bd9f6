"""What the lesson sharding measures with: pipelines and meshes."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import loss_parallel

from workshop.notebook.sharding import Traffic, load

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

    def __init__(self, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds, self.events = seconds, []

    def forward(self, x):
        return Sleep.apply(x * self.weight, self)

    def spend(self, name, seconds):
        number = sum(event[0] == name for event in self.events)
        begin = time.perf_counter()
        time.sleep(seconds)
        self.events.append([name, number, begin, time.perf_counter()])


def run_pipeline(Schedule, microbatches, forward, backward):
    """What this rank's stage does in a step of the schedule: its events.

    forward, backward: seconds that a stage takes for a microbatch. Every rank
    is a stage of its own. The events are those of `Work`, from time 0 on.
    """
    work = Work((0, 0))
    stage = PipelineStage(work, dist.get_rank(), dist.get_world_size(),
                          torch.device("cpu"))
    schedule = Schedule(stage, microbatches,
                        loss_fn=lambda y, target: (y - target).sum())
    x = torch.zeros(microbatches, 8)
    losses = []
    for seconds in ((0, 0), (forward, backward)):  # first it warms up
        work.seconds, work.events = seconds, []
        dist.barrier()
        schedule.step(*[x] if stage.is_first else [],
                      target=x if stage.is_last else None, losses=losses)
    start = torch.tensor(work.events[0][2], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MIN)
    return [[name, number, begin - start.item(), end - start.item()]
            for name, number, begin, end in work.events]


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
    most = now = 0
    for name, *_ in events:
        now += 1 if name == "F" else -1
        most = max(most, now)
    return most


# ------------------------------------------------------------ three dimensions


def traffic_3d(pp, tp, accumulation_steps, B):
    """A step of the stage 3d: this rank's model, and a `Traffic`.

    The model is of preset tiny, with a vocabulary of 512 tokens; B: samples of
    a microbatch.
    """
    mesh = dist.init_device_mesh(
        "cpu", (pp, dist.get_world_size() // pp // tp, tp),
        mesh_dim_names=("pp", "dp", "tp"))
    config = script.replace(script.MODELS["tiny"], vocab_size=512)
    torch.manual_seed(0)
    model = script.GPT(config)
    script.parallelize(model, mesh["tp"])
    number = mesh.get_local_rank("pp")
    script.cut(model, number, pp)
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=mesh["dp"])
    stage = PipelineStage(model, number, pp, torch.device("cpu"),
                          group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, accumulation_steps,
                            lambda loss, target: loss.full_tensor())
    batch = torch.randint(512, (2, accumulation_steps * B, 32))
    with loss_parallel():
        for _ in range(2):  # the first step sends more, to learn the shapes
            with Traffic() as traffic:
                script.training_step(schedule.step, batch,
                                     torch.device("cpu"), "fp32")
    return model, traffic
