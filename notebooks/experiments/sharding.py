"""What the lesson sharding measures with: memory and traffic."""

import collections
import importlib.util

from torch.autograd.graph import saved_tensors_hooks

from rankcheck.record.collectives import Collectives
from workshop.stages import find_stage


def load(stage):
    """The finished script of a stage, as a module."""
    spec = importlib.util.spec_from_file_location(
        "train_gpt2", find_stage(stage).solution)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


std = load("std")


def compare(what, measured, formula):
    """Print a measured number of bytes beside the one that was expected."""
    print(f"{what}: {measured:,} bytes, by the formula {formula:,}")


class Comparison:
    """The same for several cases: a table, with two columns for each."""

    def __init__(self, *cases):
        self.cases, self.rows = cases, {}

    def add(self, what, measured, formula):
        """Add to the row of this name what belongs to the next case."""
        self.rows.setdefault(what, []).extend((measured, formula))

    def print(self):
        """Print the table, in lines that are as wide as a cell's."""
        print(" " * 18 + "".join(f"{case:>18}" for case in self.cases))
        print(f"{'bytes':18}" + f"{'measured':>9}{'formula':>9}"
              * len(self.cases))
        for what, row in self.rows.items():
            print(f"{what:18}" + "".join(f"{count:>9,}" for count in row))


def saved_bytes(model, x, y):
    """The bytes of activations that are kept for the backward pass.

    x, y: int64 (B, T). What autograd saves is counted once for each storage,
    and neither are the weights counted, nor x and y, which are there anyway.
    """
    known = {tensor.untyped_storage().data_ptr()
             for tensor in (*model.parameters(), x, y)}
    kept, alive = {}, []

    def pack(tensor):
        alive.append(tensor)  # so that no other tensor gets its address
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x, y)
    return sum(kept.values())


class Traffic(Collectives):
    """Counts what this process sends: `calls` and `bytes`, by operation.

    Bytes are those that go into a collective, also in the backward pass.
    """

    def __init__(self):
        super().__init__(self.count)
        self.calls, self.bytes = collections.Counter(), collections.Counter()

    def count(self, name, tensors, function, args):
        if name != "barrier":
            self.calls[name] += 1
            self.bytes[name] += sum(tensor.nbytes for tensor in tensors)
