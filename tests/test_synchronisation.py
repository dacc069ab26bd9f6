"""What a GPU would wait for: counted on the CPU."""

import json
from pathlib import Path

import pytest
from stages import train


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


# The loss, and whether to stop, of all ranks; then the norm.
REPORT = ["reduce", "wait tolist", "wait item"]


@pytest.mark.parametrize("stage, world_size, expected", [
    ("std", None, ["update", "wait item", "wait item"]),
    ("ddp", 2, ["update", *REPORT]), ("fsdp", 2, ["update", *REPORT]),
    pytest.param("tp", 2, ["reduce", "update", *REPORT],  # first its norm
                 marks=pytest.mark.whole)])
def test_a_step_waits_for_the_device_once_its_report_is_reduced(
        data, tmp_path, stage, world_size, expected):
    ended = train(stage, tmp_path / "run", "--max-steps", 3,
                  "--microbatch-size", 1, "--eval-every", 100, data=data,
                  world_size=world_size, observe=Waits(tmp_path))
    assert ended.status == 0, ended.err
    for rank in range(world_size or 1):
        steps = list(waits(tmp_path, rank))
        assert len(steps) == 3
        for microbatches, inside, end in steps[:2]:
            assert microbatches == 8 // (world_size or 1)
            assert inside == [] and end == expected
