"""The record of one rank: how it is written and read.

Two files for each: <rank>.json, with a schema's version, and <rank>.pt, the
tensors that it refers to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar

import torch

from rankcheck.record.tensors import LocalTensors
from rankcheck.system.errors import InternalError

# A dictionary with one of these names stands for what JSON does not have
TENSOR = "__tensor__"  # its number in the file of tensors
TUPLE = "__tuple__"  # its items
ITEMS = "__items__"  # of a dictionary whose keys are no strings: key, value

AnyRecord = TypeVar("AnyRecord", bound="RankRecord")


class GroupSettings(TypedDict):
    """What is set for a group of an optimizer's parameters."""

    names: list[str]  # of the parameters
    values: dict[str, tuple[float, ...]]  # of outputs.PLAIN_SETTINGS, and "lr"


class RecordedOutputs(TypedDict):
    """What the modules have put out, as `rankcheck.record.outputs` says."""

    entries: list[dict[str, Any]]  # the fields of an `Entry`
    # of each forward pass, by axis, the hashes of what is looked at
    samples: list[dict[str, list[str]]]
    flat: torch.Tensor  # all sketches


@dataclass
class RankRecord:
    """What the probes have seen of one rank. Each sets the fields it knows.

    A client with probes of its own adds their fields in a subclass.

    Attributes:
        facts: about the script, such as an option that it uses: (name,
            value), in the order in which they were seen.
        joined: whether it was still in a process group at its end.
        writers: files that it opened to write them -> who opened them; see
            `rankcheck.record.files.opener`.
        files_read: those that it opened before its first step.
        files_written: those that it wrote after that.
        devices: the numbers of the GPUs that it used.
        dropout: whether dropout was switched off.
        batchnorm: whether the statistics of a microbatch enter the loss.
        low_precision: whether it computes in less than float32.
        draws_random: whether a forward pass draws random numbers.
        copies: the weights of modules like the model that do not train.
        model: the parameters' names -> their shapes.
        tied_names: further names of parameters -> their first ones.
        steps: what led to each step of an optimizer, and its result;
            see `rankcheck.record.rows.Rows.snapshot`.
        shapes: the shapes of the parameters that optimizers have.
        saved_before_step: before which step it has saved something; None if
            it has not.
        skipped_steps: those before which a GradScaler left one out.
        discarded_steps: those before which gradients were thrown away.
        outputs: of the modules, in the first steps; None if there are none.
        fingerprints: of the parameters as an optimizer first has them, except
            DTensors; see `rankcheck.record.fingerprints`. Empty in the runs
            of another kind than "".
        settings: of the optimizers' groups, of each optimizer.
        outputs_error: why outputs are no longer recorded.
    """

    SCHEMA: ClassVar[int] = 4

    facts: list[tuple[str, Any]] = field(default_factory=list)
    joined: bool = False
    writers: dict[str, int | str] = field(default_factory=dict)
    files_read: list[str] = field(default_factory=list)
    files_written: list[str] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    dropout: bool = False
    batchnorm: bool = False
    low_precision: bool = False
    draws_random: bool = False
    copies: list[LocalTensors] = field(default_factory=list)
    model: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied_names: dict[str, str] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    saved_before_step: int | None = None
    skipped_steps: list[int] = field(default_factory=list)
    discarded_steps: list[int] = field(default_factory=list)
    outputs: RecordedOutputs | None = None
    fingerprints: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    settings: list[list[GroupSettings]] = field(default_factory=list)
    outputs_error: str = ""

    def fact_values(self, name: str) -> list[Any]:
        """Return the values of the facts of this name."""
        return [value for known, value in self.facts if known == name]

    def write(self, folder: str, rank: int,
              save: Callable[[object, str], object]) -> None:
        """Write the record; its last file is complete once it is there.

        Args:
            folder: where.
            rank: whose record it is.
            save: the original torch.save.

        Raises:
            OSError, RuntimeError: it cannot be written.
            TypeError: a probe has set what cannot be recorded.
        """
        tensors: dict[int, torch.Tensor] = {}
        packed = {one.name: pack(getattr(self, one.name), tensors)
                  for one in fields(self)}
        text = json.dumps({"schema": self.SCHEMA, **packed})
        save(tensors, f"{folder}/{rank}.pt")
        file = record_file(folder, rank)
        part = file.with_suffix(".part")
        part.write_text(text)
        os.replace(part, file)

    @classmethod
    def read_from(cls: type[AnyRecord], folder: str | os.PathLike[str],
                  rank: int) -> AnyRecord | None:
        """Read the record of a rank; None if it died before it wrote one.

        Raises:
            InternalError: the record is not of this schema.
        """
        file = record_file(folder, rank)
        if not file.exists():
            return None
        packed = json.loads(file.read_text())
        known = {one.name for one in fields(cls)}
        if packed.pop("schema", None) != cls.SCHEMA or packed.keys() != known:
            raise InternalError(f"{file.name} is not a record of this version "
                                "of rankcheck")
        tensors = torch.load(file.with_suffix(".pt"))
        return cls(**{name: unpack(value, tensors)
                      for name, value in packed.items()})


def record_file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of a rank's record, which is written at its end."""
    return Path(folder, f"{rank}.json")


def pack(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """Return a value as JSON has it, and add its tensors to `tensors`, each
    once, by its id.

    Raises:
        TypeError: it holds something of another type than those of a record.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors[id(value)] = value
        return {TENSOR: id(value)}
    if isinstance(value, tuple):
        return {TUPLE: [pack(one, tensors) for one in value]}
    if isinstance(value, list):
        return [pack(one, tensors) for one in value]
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} cannot be recorded")
    if all(isinstance(key, str) for key in value):
        return {key: pack(one, tensors) for key, one in value.items()}
    return {ITEMS: [[pack(key, tensors), pack(one, tensors)]
                    for key, one in value.items()]}


def unpack(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Return the value that `pack` was given."""
    if isinstance(value, list):
        return [unpack(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        return tensors[value[TENSOR]]
    if value.keys() == {TUPLE}:
        return tuple(unpack(one, tensors) for one in value[TUPLE])
    if value.keys() == {ITEMS}:
        return {unpack(key, tensors): unpack(one, tensors)
                for key, one in value[ITEMS]}
    return {key: unpack(one, tensors) for key, one in value.items()}
