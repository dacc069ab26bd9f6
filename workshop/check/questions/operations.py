"""Questions about a script with kernels: what each operation computes."""

import json

from rankcheck import exits
from rankcheck.findings import Line, fail
from workshop.check.questions.question import question


@question("each operation computes what PyTorch's does", ("operations",),
          early=True)
def operations(trial, reference):
    """What workshop.check.operations says of them."""
    finding = exits.explain(trial)
    if finding:
        return finding
    for name, wrong in json.loads(trial.ranks[0].out.splitlines()[-1]).items():
        if wrong is None:
            return fail(f"it has no function {name}")
        if wrong:
            text, line, error = wrong
            return fail([f"{name}: {text}", *exits.in_brackets(
                map(Line, line))], "on "
                        "shapes that leave the last tile half empty: think of "
                        "masks, of what is summed over tiles, and of who "
                        "writes where", text if error else "")
    return None


@question("it trains with kernels of its own",
          where=lambda trial: trial.about.kernels)
def own(trial, reference):
    for name in trial.asked("pytorch"):
        return fail(f"it trains with PyTorch's {name}, not with a kernel of "
                    "its own")
    return None
