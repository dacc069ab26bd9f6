"""The results of the runs: read them from their folders, and fit a model.

Only `fit` needs NumPy.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from backstage import ROOT
from backstage.errors import UserError, require
from backstage.files import (
    StrPath,
    read_json,
    reading,
    require_like,
    show_path,
)
from backstage.flops import num_parameters
from backstage.record import (
    RECORD,
    Row,
    describe_start,
    last_start,
    read_record,
    read_table,
    to_numbers,
)
from rankcheck.engine.findings import count_of
from workshop.results.arithmetic import is_count, of_step, ring
from workshop.stages import FIRST_STAGE, STAGES

RUNS, EXAMPLES = ROOT / "runs", ROOT / "example-logs"
CONFIG = "block_size", "vocab_size", "n_layer", "n_head", "n_embd"
COUNTS = "minibatch_size", "microbatch_size", "sequence_length"
DIVISORS = "pipeline_parallel", "tensor_parallel"  # which some stages have
POSITIVE = ("nodes", "max_steps", "world_size", *CONFIG, *COUNTS, *DIVISORS)
# How nvidia-smi, xpu-smi and amd-smi name the percentage of a GPU that is busy
UTILISATIONS = ("sm", "gpu utilization (%)", "gfx")
COMPARED_SETTINGS = ("preset", "data", "minibatch_size", "sequence_length")


def read_started(folder: StrPath) -> dict[str, Any]:
    """Return the content of a run's `hyperparameters.json`.

    Raises `FileNotFoundError`, or a `UserError` if it is damaged.
    """
    record = read_record(folder, {})
    with reading(Path(folder) / RECORD):
        hp = dict.fromkeys(DIVISORS, 1) | record["hyperparameters"]
        require_like({"nodes": 1} | record, {
            "stage": str, "device": str, "nodes": int, "max_steps": int,
            "world_size": int, "config": dict.fromkeys(CONFIG, int)})
        require_like({"strategy": ""} | hp, {
            "preset": str, "data": str, "strategy": str,
            **dict.fromkeys((*COUNTS, *DIVISORS), int)})
        require(hp["preset"], "preset is empty")
        for name, value in (record | hp | record["config"]).items():
            require(name not in POSITIVE or is_count(value),
                    f"{name} is not a positive integer")
    return record


def read_metrics(file: StrPath) -> Iterator[Row]:
    """A dictionary for each row of metrics.csv: {column: number, or None}.

    Raises `FileNotFoundError`, or a `UserError` at the first damaged row.
    """
    with reading(file):
        _, table = read_table(file)
        for cells in table:
            yield to_numbers(cells)


def describe_run_start(folder: StrPath) -> str:
    """Return how a run was started, in one line; "" if unknown."""
    with suppress(UserError, FileNotFoundError):
        record = read_started(folder)
        with reading(Path(folder) / RECORD):
            startup = record["startup"]
            return describe_start(record) + (
                f"; startup {startup:.1f} s" if startup else "")
    return ""


def add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="run", help="its folder")


def progress(args: argparse.Namespace) -> int:
    """Print how many steps are saved; return 0 if it is all, else 1.

    The batch files use it to find out whether there is something left to do.
    """
    folder = args.folder
    files = Path(folder, "checkpoints").glob(f"step_{8 * '[0-9]'}.pt")
    step = max((int(file.stem[len("step_"):]) for file in files), default=0)
    steps = None
    with suppress(FileNotFoundError, UserError):  # it has not started yet
        steps = read_started(folder)["max_steps"]
    print(f"{step} of {'?' if steps is None else steps} steps are saved")
    return int(steps is None or step < steps)


class RecordedRun:
    """A run: the contents of hyperparameters.json and metrics.csv."""

    def __init__(self, folder: Path, record: Mapping[str, Any],
                 rows: list[Row]) -> None:
        """rows: a dictionary of floats for each step.

        Raises a `UserError` for more parts than processes.
        """
        self.folder, self.rows = folder, rows
        self.stage: str = record["stage"]
        self.world_size: int = record["world_size"]
        self.device: str = record["device"]
        self.config: dict[str, int] = record["config"]
        self.nodes: int = record.get("nodes", 1)
        hp: dict[str, Any] = record["hyperparameters"]
        self.hyperparameters = hp
        self.preset: str = hp["preset"]
        strategy = hp.get("strategy", "ddp")  # Lightning's
        # what is compared
        self.kind = self.stage + f" {strategy}" * (strategy != "ddp")
        self.name = f"{self.kind} x {self.world_size}"
        # how many processes: (pipeline, data, tensor) parallel
        pp, tp = (hp.get(divisor, 1) for divisor in DIVISORS)
        self.mesh = pp, self.world_size // (pp * tp), tp
        require(self.mesh[1],
                f"{show_path(folder)}: more parts than processes")
        # how many microbatches a process takes in a step
        self.accumulation = hp["minibatch_size"] // (
            hp["microbatch_size"] * self.mesh[1])
        self.seconds = self.median("seconds") or 0.0  # known in each row
        self.tokens_per_second = self.median("tokens_per_second") or 0.0
        self.mfu = self.median("mfu")
        # the most bytes on rank 0; None in an older run
        self.memory: float | None = max(
            (row["memory"] for row in rows if row["memory"] is not None),
            default=None)

    @property
    def sent(self) -> int | None:
        """The bytes that a process puts into its messages in a step.

        Those of the stage of the pipeline that sends most; None if unknown.
        """
        hp = self.hyperparameters
        if self.kind not in STAGES:
            return None
        found = of_step(STAGES[self.stage].split, self.config, self.mesh,
                        self.accumulation, hp["microbatch_size"],
                        hp["sequence_length"])
        if found is None:
            return None
        return max(sum(size for _, size in rank.values()) for rank in found)

    def median(self, column: str) -> float | None:
        """Without the first fifth, the warm-up; None if it is not known."""
        values = [row[column] for row in self.rows[len(self.rows) // 5:]
                  if row[column] is not None]
        return statistics.median(values) if values else None

    def alike(self, other: RecordedRun) -> bool:
        """Whether both train the same model on the same minibatches."""
        return self.config == other.config and all(
            self.hyperparameters.get(key) == other.hyperparameters.get(key)
            for key in COMPARED_SETTINGS)


def read_run(folder: Path) -> RecordedRun:
    """The run in a folder; a `UserError` if there is nothing to show."""
    try:
        record = read_started(folder)
        rows = [*read_metrics(folder / "metrics.csv")]
    except FileNotFoundError as error:
        raise UserError(f"{show_path(folder)}: no "
                        f"{Path(error.filename).name}") from error
    require(rows, f"{show_path(folder)}: no step has finished yet")
    return RecordedRun(folder, record, rows)


def find_runs(folders: Iterable[StrPath] = ()) -> tuple[list[RecordedRun],
                                                        list[str]]:
    """The runs to show, and lines that say what is not shown and why.

    Without folders, these are the runs in runs/ that train the same as the
    newest one; of several with the same stage, strategy and world size, the
    newest. If runs/ holds none, they are the examples. Raises `UserError` if
    nothing can be shown.
    """
    named = [Path(folder) for folder in folders]
    results, notes = read_runs(named or list_folders(RUNS))
    if not (results or named):
        notes.append("No run to show in runs/ yet: these are the examples "
                     "in example-logs/.")
        results, problems = read_runs(list_folders(EXAMPLES))
        notes += problems
    return select_comparable(results, notes, named)


def select_comparable(results: list[RecordedRun], notes: list[str],
                      named: Sequence[Path] = ()) -> tuple[list[RecordedRun],
                                                           list[str]]:
    """Those that train the same, in the order of the stages, and notes."""
    require(results, "; ".join(notes) or "no run to show; fix: train one")
    if not named:
        newest = results[-1]
        same = [result for result in results if result.alike(newest)]
        if len(same) < len(results):
            count = len(results) - len(same)
            notes.append(f"Left out: {count_of(count, 'run')} whose preset, "
                         "data, minibatch or length differs from that of "
                         f"{show_path(newest.folder)}.")
        results = list({result.name: result for result in same}.values())
    order = [*STAGES]
    results.sort(key=lambda result: (
        order.index(result.stage) if result.stage in order else len(order),
        result.kind, result.world_size))
    return results, notes


def read_runs(folders: Iterable[Path]) -> tuple[list[RecordedRun], list[str]]:
    """The runs, and a line for each that cannot be read."""
    results, problems = [], []
    for folder in folders:
        try:
            results.append(read_run(folder))
        except UserError as error:
            problems.append(str(error))
    return results, problems


def list_folders(parent: Path) -> list[Path]:
    """The run folders in a folder; the one started last comes last."""
    folders = [path for path in parent.glob("*") if path.is_dir()]
    return sorted(folders, key=lambda folder: (last_start(folder), folder))


# ----------------------------------------------------------------- scaling


@cache
def read_given() -> dict[str, Any]:
    """What example-logs/given.json says; README.md there, where it is from.

    published_gpus, published: another course's seconds per epoch on so many
    GPUs, by device and batch size; university: a project's seconds of training
    and of writing texts; rungs: how each of benchmarks/ladder.py differs from
    std.
    """
    return json.loads((EXAMPLES / "given.json").read_text("utf-8"))


def published_efficiency(device: str, batch_size: str) -> dict[int, float]:
    """Speed of each GPU, relative to one alone: {n: ratio}."""
    seconds = read_given()["published"][device][batch_size]
    return {n: seconds[0] / (n * value) for n, value in
            zip(read_given()["published_gpus"], seconds, strict=True)}


def lost_seconds(device: str) -> dict[int, float]:
    """Return what an epoch takes more on all GPUs together than on one.

    Of another course's GPUs of this kind, on as many as it has measured:
    {batch size: seconds, added up over the GPUs}.
    """
    given = read_given()
    count = given["published_gpus"][-1]
    return {int(size): count * seconds[-1] - seconds[0]
            for size, seconds in given["published"][device].items()}


def efficiency(results: Iterable[RecordedRun]) -> dict[str, dict[int, float]]:
    """Tokens/s per process, relative to one alone: {kind: {n: ratio}}.

    A kind is compared with its own run on one process, or else with the first
    stage; without either it is left out.
    """
    single = {result.kind: result.tokens_per_second
              for result in results if result.world_size == 1}
    kinds: dict[str, dict[int, float]] = {}
    for result in results:
        one = single.get(result.kind, single.get(FIRST_STAGE))
        if one:
            kinds.setdefault(result.kind, {})[result.world_size] = (
                result.tokens_per_second / result.world_size / one)
    return kinds


@dataclass
class Model:
    """t_step = A * t_microbatch + t_optimizer + t_exposed, in seconds.

    t_exposed = traffic / bandwidth is the part of the all-reduce that is not
    hidden behind the backward pass. So this bandwidth is apparent: the links
    are slower. There is one inside a node, and another one as soon as there
    are several nodes. One that was not measured is taken to be like the other.
    """

    microbatch: float
    optimizer: float  # includes t_exposed if they cannot be told apart
    per_byte: float | None  # 1 / bandwidth inside a node
    per_byte_between: float | None  # 1 / bandwidth between nodes
    num_bytes: int  # of the gradients
    told_apart: bool = True

    def parts(self, n: int, accumulation: float,
              nodes: float = 1) -> tuple[float, float, float]:
        per_byte, other = self.per_byte, self.per_byte_between
        if nodes > 1:
            per_byte, other = other, per_byte
        if per_byte is None:
            per_byte = other or 0
        return (accumulation * self.microbatch, self.optimizer,
                ring(n, self.num_bytes) * per_byte)

    def seconds(self, n: int, accumulation: float, nodes: float = 1) -> float:
        return sum(self.parts(n, accumulation, nodes))


def fit(points: Mapping[tuple[int, int, int], float],
        num_bytes: int) -> Model | None:
    """The `Model` nearest to {(n, accumulation, nodes): seconds}, or None.

    It minimises the squares of the relative errors, with no time below zero,
    and needs at least three world sizes. With a single minibatch size, both A
    and the traffic are linear in 1/n, so the times of the optimizer and of the
    all-reduce cannot be told apart: then they stay together, but for what the
    all-reduce takes longer between nodes.
    """
    import numpy as np

    if len({n for n, *_ in points}) < 3:
        return None
    matrix = np.array([
        [A, 1, *(ring(n, num_bytes) * here for here in (
            nodes == 1, nodes > 1))] for n, A, nodes in points])
    measured = [column for column in range(4) if matrix[:, column].any()]
    scale = matrix.max(axis=0).clip(min=1)
    rank = np.linalg.matrix_rank(matrix / scale)
    told_apart = bool(rank == len(measured))
    # else the all-reduce inside a node is in the optimizer's time
    fitted = [column for column in measured if told_apart or column != 2]
    matrix = matrix / scale / np.array(list(points.values()))[:, None]
    best, least = None, np.inf
    for size in range(1, len(fitted) + 1):  # how many times are above zero
        for columns in combinations(fitted, size):
            part = np.linalg.lstsq(matrix[:, columns], np.ones(len(points)),
                                   rcond=None)[0]
            error = np.sum((matrix[:, columns] @ part - 1) ** 2)
            if (part >= 0).all() and error < least:
                best, least = np.zeros(4), error
                best[list(columns)] = part
    microbatch, optimizer, inside, between = (best / scale).tolist()
    return Model(microbatch, optimizer, inside if 2 in measured else None,
                 between if 3 in measured else None, num_bytes, told_apart)


def fit_kind(results: Iterable[RecordedRun], kind: str) -> Model | None:
    """The model of the runs of a kind, or None if there are too few."""
    runs = [result for result in results if result.kind == kind]
    if not runs:
        return None
    points = {(run.world_size, run.accumulation, run.nodes): run.seconds
              for run in runs}
    return fit(points, 4 * num_parameters(runs[0].config))  # fp32 gradients


def read_ladder(example: bool = False) -> dict[str, Any]:
    """What benchmarks/ladder.py has measured: here, or else the example."""
    file = RUNS / "ladder.json"
    if example or not file.exists():
        file = EXAMPLES / "ladder.json"
    again = "run benchmarks/ladder.py again"
    ladder = read_json(file, {"rungs": [{"training": float}]}, again)
    require(all(rung["training"] > 0 for rung in ladder["rungs"]),
            f"{file}: a rung has no time: {again}")
    return ladder


def utilisation(folder: Path) -> dict[str, list[float]]:
    """{"node GPU 0": [percent, ...]} from the run's files of GPU metrics.

    A batch file has `nvidia-smi dmon` (words under a header), `xpu-smi dump`
    or `amd-smi monitor` (commas) write them on each node, every ten seconds.
    """
    gpus: dict[str, list[float]] = {}
    for file in sorted(folder.glob("gpus-*.txt")):
        node, header = file.stem[len("gpus-"):], []
        for line in file.read_text(errors="replace").splitlines():
            cells = line.split("," if "," in line else None)
            cells = [cell.strip("# ").lower() for cell in cells]
            cells = [cell for cell in cells if cell]
            if "gpu" in cells or "deviceid" in cells:
                header = cells  # it is repeated now and then
                continue
            values = dict(zip(header, cells, strict=False))
            gpu = values.get("gpu", values.get("deviceid"))
            busy = next((values[name] for name in UTILISATIONS
                         if name in values), "")
            with suppress(ValueError):  # units, "-", a cut line
                percent = float(busy)
                gpus.setdefault(f"{node} GPU {gpu}", []).append(percent)
    return gpus
