"""What is done and what comes next: for start_here, and for `lab`.

Only the standard library, from Python 3.9 on.
"""

from collections import Counter

from workshop.lesson import checked
from workshop.lesson.diff import Diff, Script, nearest, read_stages
from workshop.results import runs
from workshop.stages import DESK, LESSONS, find


def main(args):
    """Print what comes next, and the command that goes on."""
    words, lessons = what_next()
    print(words)
    for name in lessons:
        print(f"  python -m workshop lab {name:8}  {find(name).title}")
    print("All commands: python -m workshop --help")


def done():
    """Rows: each lesson, when its check was passed last, how many runs."""
    found, _ = runs.read_all(runs.list_folders(runs.RUNS))
    count = Counter(run.stage for run in found)
    return [(stage, find(stage).title,
             (checked.last_passed(stage) or "")[:16], count[stage])
            for stage in LESSONS]


def what_next():
    """(a line about the script and what comes next, its lessons).

    Raises `UserError` if there is no script.
    """
    script = Script(DESK)
    _, stage = nearest(script, read_stages())
    after = sorted((name for name in LESSONS if find(name).after == stage),
                   key=lambda name: -sum(  # first, what most goes on from
                       find(later).after == name for later in LESSONS))
    begun = [diff for diff in (Diff(name, script.path) for name in (
        *[stage][:stage in LESSONS], *after))
             if 0 < len(diff.left) < diff.total]
    if begun:
        diff = min(begun, key=lambda diff: len(diff.others))
        return (f"Your script is on its way to {diff.stage}: {len(diff.left)} "
                f"of {diff.total} changes are left.", [diff.stage])
    if stage in LESSONS and checked.state(
            stage, script.data) != checked.PASSED:
        return (f"Your script is {stage}, and this version has not passed the "
                f'check: `python -m workshop check {stage}`', [stage])
    return (f"Your script is {stage}" + ", checked" * (stage in LESSONS)
            + ". What can follow:" if after else
            f"Your script is {stage}, checked: the last one.", after)
