"""What a GPU would wait for, and what DDP would send: counted on the CPU."""

import json
import os
from pathlib import Path

import pytest
from conftest import needs
from stages import train, with_layers

from workshop.processes import launch
from workshop.stages import STAGES

# ------------------------------------------------ nothing waits for the device


class Waits:
    """Notes, in order, what a rank does that would make it wait for a GPU.

    "forward" and "backward" of a microbatch, "update" of the optimizer,
    "reduce" where the script calls all_reduce, and "wait" and by what: a
    tensor's value becomes Python's or NumPy's. A copy from the CPU to the
    device is none.
    """

    def __init__(self, folder):
        self.folder = Path(folder)

    def __call__(self, rank):
        import torch
        import torch.distributed as dist
        from torch.nn.modules.module import (
            register_module_forward_pre_hook as before_forward,
        )
        from torch.optim.optimizer import (
            register_optimizer_step_pre_hook as before_update,
        )
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        said = []
        out = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}

        class Calls(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(),
                                   kwargs=None):
                # of a tensor on the CPU, these read the memory at once
                if function in out:
                    said.append(f"wait {function.__name__}")
                elif function is torch.tensor and any(
                        isinstance(leaf, torch.Tensor)
                        for leaf in tree_leaves(args)):
                    said.append("wait tensor")
                result = function(*args, **(kwargs or {}))
                if function is torch.Tensor.backward:
                    said.append("backward")
                return result

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(),
                                   kwargs=None):
                # item(), float(), if, nonzero()
                if operation is torch.ops.aten._local_scalar_dense.default:
                    said.append("wait item")
                elif operation is torch.ops.aten.nonzero.default:
                    said.append("wait nonzero")
                return operation(*args, **(kwargs or {}))

        def forward(module, _):
            names = {each.__name__ for each in type(module).__mro__}
            if "GPT" in names and torch.is_grad_enabled():
                said.append("forward")

        reduce = dist.all_reduce

        def visible_reduce(*args, **options):
            said.append("reduce")
            return reduce(*args, **options)

        dist.all_reduce = visible_reduce
        before_forward(forward)
        before_update(lambda *_: said.append("update"))
        Calls().__enter__()
        Operations().__enter__()

        def finish():
            (self.folder / f"{rank}.json").write_text(json.dumps(said))

        return finish


def waits(folder, rank=0):
    """Of each step: (its microbatches, waits among them, what follows).

    A step begins with the first forward after an update.
    """
    said = json.loads((Path(folder) / f"{rank}.json").read_text())
    steps, updated = [], True
    for event in said:
        if event == "forward" and updated:
            steps.append([])
            updated = False
        updated |= event == "update"
        if steps:
            steps[-1].append(event)
    for step in steps:
        end = len(step) - step[::-1].index("backward")
        inside = [event for event in step[:end] if event[:4] == "wait"]
        yield step.count("forward"), inside, step[end:]


FLAGS = ("--max-steps", 3, "--microbatch-size", 1, "--eval-every", 100,
         "--generate-every", 100, "--checkpoint-every", 100)


# The loss, and whether to stop, of all ranks; then the norm.
REPORT = ["reduce", "wait tolist", "wait item"]


@pytest.mark.parametrize("stage, world_size, expected", [
    ("std", None, ["update", "wait item", "wait item"]),
    ("ddp", 2, ["update", *REPORT]), ("fsdp", 2, ["update", *REPORT]),
    pytest.param("tp", 2, ["reduce", "update", *REPORT],  # first its norm
                 marks=pytest.mark.whole)])
def test_a_step_waits_for_the_device_once_its_report_is_reduced(
        data, tmp_path, stage, world_size, expected):
    ended = train(stage, tmp_path / "run", *FLAGS, data=data,
                  world_size=world_size, observe=Waits(tmp_path))
    assert ended.status == 0, ended.err
    for rank in range(world_size or 1):
        steps = list(waits(tmp_path, rank))
        assert len(steps) == 3
        for microbatches, inside, end in steps[:2]:
            assert microbatches == 8 // (world_size or 1)
            assert inside == [] and end == expected


# ------------------------------------------------------- the reducer of eight


class RankOfEight:
    """Lets the script be rank 0 of 8, of which it is the only one.

    The backend "fake" sends nothing and returns at once; DDP and its reducer
    are the real ones. Notes each bucket that the reducer gives to its
    communication hook, and at the end what torch.compile has done.
    """

    def __init__(self, folder, megabytes=None):
        self.folder, self.megabytes = Path(folder), megabytes

    def __call__(self, rank):
        import torch
        import torch.distributed as dist
        from torch._dynamo.utils import counters
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook as after_update,
        )
        from torch.testing._internal.distributed.fake_pg import FakeStore

        join = dist.init_process_group
        dist.init_process_group = lambda *_, **__: join(
            "fake", rank=0, world_size=8, store=FakeStore())
        torch._dynamo.config.error_on_recompile = True
        steps = [[]]

        def note(_, bucket):
            steps[-1].append(bucket.buffer().numel())
            sent = torch.futures.Future()
            sent.set_result(bucket.buffer())
            return sent

        wrap = DistributedDataParallel.__init__

        def wrap_and_note(model, *args, **options):
            if self.megabytes:
                options["bucket_cap_mb"] = self.megabytes
            wrap(model, *args, **options)
            model.register_comm_hook(None, note)
            self.parameters = sum(
                weight.numel() for weight in model.parameters())

        DistributedDataParallel.__init__ = wrap_and_note
        after_update(lambda *_: steps.append([]))

        def finish():
            (self.folder / "eight.json").write_text(json.dumps({
                "parameters": self.parameters, "steps": steps[:-1],
                "graphs": counters["stats"]["unique_graphs"],
                "breaks": list(counters["unimplemented"])}))

        return finish


def train_as_rank_of_eight(data, folder, *flags, script=None, megabytes=None):
    """Three steps with four microbatches each; what the reducer did."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8",
                 "LOCAL_WORLD_SIZE": "8"}
    rank, = launch(
        script or STAGES["ddp"].solution, "--preset", "tiny", "--device",
        "cpu", "--data", data, "--run", folder / "run", "--minibatch-size",
        64, "--microbatch-size", 2, "--max-steps", 3, "--eval-every", 100,
        "--generate-every", 100, *flags, env={**os.environ, **variables},
        observe=RankOfEight(folder, megabytes), timeout=280)
    assert rank.status == 0, rank.err
    assert "does not work here" not in rank.err
    return json.loads((folder / "eight.json").read_text())


def test_every_gradient_is_sent_once_a_step(data, tmp_path):
    """In one bucket, or in several, whatever the number of microbatches."""
    seen = train_as_rank_of_eight(data, tmp_path)
    assert seen["steps"] == [[seen["parameters"]]] * 3
    (tmp_path / "run").rename(tmp_path / "first")
    several = train_as_rank_of_eight(data, tmp_path, megabytes=0.05)
    first, *others = several["steps"]
    assert first == [seen["parameters"]]  # DDP does not know the order yet
    for buckets in others:
        assert len(buckets) > 2 and sum(buckets) == seen["parameters"]


@pytest.mark.whole
def test_one_graph_and_no_recompilation(data, tmp_path):
    """DDP around the compiled model, with and without no_sync."""
    needs("g++")
    seen = train_as_rank_of_eight(data, tmp_path, "--compile",
                                  script=with_layers(1, "ddp", tmp_path))
    assert seen["steps"] == [[seen["parameters"]]] * 3
    # compile_model's trial, and the model
    assert (seen["graphs"], seen["breaks"]) == (2, [])


