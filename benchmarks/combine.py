"""Two stages in one script: python benchmarks/combine.py mpi kernels FILE

Both begin with the stage std, and change other lines of it. So the script is
std with the changes of both. Only what a stage calls itself, which is the
first line and the name of its runs, is new.
"""

import re
import sys
from itertools import pairwise
from pathlib import Path

from backstage.errors import require, run_main
from backstage.files import show_path, write_atomically
from workshop.diff.diff import line_differences
from workshop.stages import FIRST_STAGE, STAGES

NAME = re.compile(r'(?<=\bRun\(")\w*')  # what a script calls its runs


def combine(*stages):
    """The text of std with the changes of these stages."""
    base, *others = (read(stage) for stage in (FIRST_STAGE, *stages))
    edits = sorted({(i1, i2, *other[j1:j2]) for other in others
                    for i1, i2, j1, j2 in line_differences(base, other)})
    for (first, end, *_), (begin, last, *_) in pairwise(edits):
        require(end <= begin and first < last,
                f"{' and '.join(stages)} both change line {begin + 1} of "
                f"{FIRST_STAGE}: no script can have both")
    lines = [*base]
    for begin, end, *new in reversed(edits):
        lines[begin:end] = new
    text = NAME.sub("-".join(stages), "".join(lines))
    return (f'"""Train GPT-2 as the stages {" and ".join(stages)} do, in one '
            f'script.\n{text}')


def read(stage):
    """A finished script's lines, without what it calls itself."""
    path = STAGES[FIRST_STAGE].solution.with_name(f"train_gpt2_{stage}.py")
    require(path.exists(), f"there is no {show_path(path)}")
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return NAME.sub("", "".join(lines[1:])).splitlines(keepends=True)


def main():
    """Write the script."""
    require(len(sys.argv) == 4, "name two stages and the file to write")
    *stages, file = sys.argv[1:]
    file = Path(file)
    require(not file.exists(), f"{file} exists already: choose another name")
    write_atomically(file, combine(*stages).encode())
    print(f"{show_path(file)}: {FIRST_STAGE} with the changes of "
          f"{' and '.join(stages)}")


if __name__ == "__main__":
    run_main(main)
