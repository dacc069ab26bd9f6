"""What it costs until something happens: a first step, a diff, a check.

    python benchmarks/startup.py                    # this tree
    python benchmarks/startup.py --before HEAD~5    # beside another commit

The commands of both trees alternate. A ratio is the median of the rounds'
ratios. CPU time counts all processes of a command; it depends less on what
else the machine does than the time on the clock.
"""

import argparse
import io
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from backstage import ROOT
from backstage.errors import UserError, require, run_main
from backstage.flags import DEMO

from turns import processor, show, take_turns

TEN_LINES = """\
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.randn(4, 8, 4):
    optimizer.zero_grad()
    model(x[rank::size]).square().mean().backward()
    optimizer.step()
"""
# the script of a new clone is std's, so change 7 is not made: status 1
COMMANDS = {
    "one step of tiny": (
        "code/train_gpt2.py", "--preset", "tiny", "--device", "cpu",
        "--max-steps", "1", "--run-dir", "{folder}/run"),
    "workshop diff ddp": ("-m", "workshop", "diff", "ddp"),
    "workshop check ddp 7": ("-m", "workshop", "check", "ddp", "7"),
    "rankcheck verify": (
        "-m", "rankcheck", "verify", "-n", "2", "--", "{folder}/ten_lines.py"),
}
STATUSES = {"workshop check ddp 7": 1}


@dataclass(frozen=True)
class Cost:
    """What a command took, in seconds.

    Attributes:
        cpu: of all of its processes.
        clock: from its begin to its end.
    """

    cpu: float
    clock: float


def measure(tree: Path, name: str) -> Cost:
    """Run a command of a tree once."""
    env = {key: value for key, value in os.environ.items()
           if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = f"{tree}:{tree / 'rankcheck' / 'src'}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ten_lines.py").write_text(TEN_LINES)
        arguments = [word.format(folder=folder) for word in COMMANDS[name]]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, *arguments], cwd=tree, env=env,
                              capture_output=True, text=True)
        clock = time.perf_counter() - begin
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    require(done.returncode == STATUSES.get(name, 0),
            f"{name} ended with status {done.returncode}:\n"
            f"{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return Cost(after.ru_utime - before.ru_utime
                + after.ru_stime - before.ru_stime, clock)


def export(commit: str, folder: Path) -> None:
    """Write the tree of a commit into a folder, with the demo dataset."""
    done = subprocess.run(["git", "archive", commit], cwd=ROOT,
                          capture_output=True)
    if done.returncode:
        raise UserError(f"--before {commit}: "
                        f"{done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    shutil.copytree(DEMO, folder / "fineweb" / "demo", dirs_exist_ok=True)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)


def compare(name: str, trees: dict[str, Path], rounds: int) -> None:
    """Print what a command costs in each tree, and the ratios."""
    for tree in trees.values():  # compiles the modules
        measure(tree, name)
    found = take_turns({side: lambda tree=tree: measure(tree, name)
                        for side, tree in trees.items()}, rounds)
    for side, costs in found.items():
        pairs = [*zip(costs, found["before"], strict=True)]
        show((name, f"{median(cost.cpu for cost in costs):.2f}",
              f"{median(one.cpu / other.cpu for one, other in pairs):.2f}",
              f"{median(cost.clock for cost in costs):.1f}",
              f"{median(one.clock / other.clock for one, other in pairs):.2f}",
              side))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="command",
                        help=f"which of {', '.join(COMMANDS)} (all)")
    parser.add_argument("--before", default="HEAD", metavar="COMMIT",
                        help="what this tree is compared with (HEAD)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in COMMANDS]
    require(not unknown, f"there is no command {', '.join(unknown)}; there "
            f"are {', '.join(COMMANDS)}")
    with tempfile.TemporaryDirectory() as folder:
        trees = {}
        for side in "before", "now":
            trees[side] = Path(folder, side)
            trees[side].mkdir()
        export(args.before, trees["before"])
        copy_tree(trees["now"])
        print(f"{processor()}, load {os.getloadavg()[0]:.1f}; seconds, and "
              "ratios to the commit before")
        show(("", "CPU", "ratio", "clock", "ratio", "tree"))
        for name in args.names or COMMANDS:
            compare(name, trees, args.rounds)


def copy_tree(folder: Path) -> None:
    """Copy the files of this tree that git knows, or could know.

    In a folder of the same kind neither tree has an advantage.
    """
    export("HEAD", folder)
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard",
         "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        target = folder / name
        if not (ROOT / name).is_file():
            target.unlink(missing_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


if __name__ == "__main__":
    run_main(main)
