"""What a GPU would wait for: counted on the CPU."""

import json
from functools import partial

import pytest
import torch
from stages import train
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rankcheck.record.recorder import replace


def waits(folder, log):
    """Notes, in order, what a rank does that would make it wait for a GPU.

    "backward" of a microbatch, "update" of the optimizer, "reduce" where the
    script calls all_reduce, and "wait" and by what: a tensor's value becomes
    Python's or NumPy's. A copy from the CPU to the device is none.
    """
    said = []
    out = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(),
                               kwargs=None):
            # of a tensor on the CPU, these read the memory at once
            if function in out:
                said.append(f"wait {function.__name__}")
            result = function(*args, **(kwargs or {}))
            if function is torch.Tensor.backward:
                said.append("backward")
            return result

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(),
                               kwargs=None):
            # item(), float(), if
            if operation is torch.ops.aten._local_scalar_dense.default:
                said.append("wait item")
            return operation(*args, **(kwargs or {}))

    @replace(dist, "all_reduce")
    def reduce(reduce, *args, **options):
        said.append("reduce")
        return reduce(*args, **options)

    register_optimizer_step_pre_hook(lambda *_: said.append("update"))
    Calls().__enter__()
    Operations().__enter__()
    log.on("end", lambda: (folder / f"{log.rank}.json").write_text(
        json.dumps(said)))


# The loss, and whether to stop, of all ranks; then the norm.
REPORT = ["reduce", "wait tolist", "wait item"]


@pytest.mark.parametrize("stage, world_size, expected", [
    ("std", None, ["update", "wait item", "wait item"]),
    ("ddp", 2, ["update", *REPORT]),
    pytest.param("tp", 2, ["reduce", "update", *REPORT],  # first its norm
                 marks=pytest.mark.whole)])
def test_a_step_waits_for_the_device_once_its_report_is_reduced(
        data, tmp_path, stage, world_size, expected):
    """In all steps but the first and the last, which save and evaluate."""
    train(stage, tmp_path / "run", "--max-steps", 3, "--eval-minibatches", 1,
          data=data, world_size=world_size,
          probes=[partial(waits, tmp_path)])
    microbatches = 4 // (world_size or 1)
    step = ["backward"] * microbatches + expected
    for rank in range(world_size or 1):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        begin = [i for i, what in enumerate(said)
                 if what == "backward"][microbatches]
        assert said[begin:begin + len(step)] == step
