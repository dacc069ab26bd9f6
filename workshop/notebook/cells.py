"""The functions that the cells of the lessons call.

They run in the server of a kernel, and in a terminal: what needs torch runs in
a process of its own. An error is shown as one line.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from backstage.errors import require
from backstage.files import show_path
from rankcheck.system.errors import read_regular
from workshop.board import Board
from workshop.diff import backups, page, render, working_copy
from workshop.diff.diff import Diff
from workshop.html import paragraph
from workshop.instructor import classroom
from workshop.jobs import interpreter
from workshop.jobs.originals import require_originals
from workshop.notebook import following, frontend, lab, magics, pictures
from workshop.notebook.cluster import (  # noqa: F401
    cancel,
    cluster,
    difference,
    freeze,
    watch,
    why_job,
)
from workshop.notebook.jobs import log, queue, slurm, submit  # noqa: F401
from workshop.notebook.output import (
    Shown,
    as_table,
    in_one_line,
    live,
    output_of,
    picture,
    run_and_show,
    show_text,
    split_arguments,
    table,
)
from workshop.notebook.planted_fault import plant, unplant, why  # noqa: F401
from workshop.results import arithmetic
from workshop.results import runs as results
from workshop.results.limit import scaling_limits
from workshop.stages import WORKING_COPY, find_stage, require_lesson
from workshop.why import measured_speeds

# ------------------------------------------------------------ every lesson


@functools.lru_cache(1)  # a site.sh may load modules, which takes seconds
def exported_variables():
    """What site.sh exports; the class's folder then is this process's, too."""
    found = interpreter.site_variables()
    if found.get("WORKSHOP_CLASS"):
        os.environ["WORKSHOP_CLASS"] = found["WORKSHOP_CLASS"]
    return found


@in_one_line
def compare(first, then):
    """The changes from one stage's solution to another's."""
    old, new = (find_stage(stage).solution.read_text() for stage
                in (first, then))
    return Shown(*render.between(old, new))


@in_one_line
def diff(stage, hints=None, all=False):
    """Show what is left to change in your script, and why; follows saves.

    hints: whether the code stays folded; left out, it is as site.sh says.
    all: all of it at once, without the reasons, as git shows it.
    """
    require_originals()
    site = exported_variables()
    if hints is None:
        hints = render.wants_hints(site)

    last = None

    @in_one_line
    def view():
        nonlocal last
        changes = Diff(stage)
        if last:
            changes.go_on_from(last)
        last = changes
        classroom.note_diff(changes)
        return Shown(render.to_html(changes, hints, all),
                     render.to_text(changes, hints=hints))

    return following.follow_script(view)


@in_one_line
def check(stage, change=None):
    """Compare your script with the single-device stage, on real processes.

    Shows a table that fills while the check runs. change: the number of a
    change, to try it alone, as it is in your script, with all others made;
    or "next", the first that is left.
    """
    require_lesson(stage)
    require(change in (None, "next") or str(change).isdecimal(),
            'the change is neither a number nor "next"; fix: write '
            f'check("{stage}", 3) or check("{stage}", "next")')
    exported_variables()
    seen, script = following.saved_state(), read_working_script()
    board, show = on_board("-m", "workshop", "check", "--events", stage,
                           *([] if change is None else [str(change)]),
                           link=page.link_lines)

    def follow():
        for is_new in following.saves(seen):
            if is_new and read_working_script() != script:
                board.is_old = True
                return show(now=True)

    threading.Thread(target=follow, daemon=True).start()


def on_board(*arguments, link=str, follows_script=True):
    """Run `python arguments...`, and show the events that it prints.

    link: a function that makes links in the HTML. follows_script: whether the
    result is about the attendee's script, which may change after it. Returns
    the `Board`, and the function that shows it anew.
    """
    board = Board(page.as_calls)
    has_ended = False

    def view():
        html = link(board.to_html(pictures.draw_check(board)))
        if board.right is not None and not board.is_old:
            html += page.KEEP_IN_SIGHT
        shown = Shown(page.styled_box(html, board.last), board.to_text())
        if has_ended and not follows_script:
            return shown
        return following.alive(shown)

    show = live(view)
    board.update({"say": "The processes start, which takes some seconds."})
    show(now=True)

    def on_line(line):
        board.read(line)
        show()

    try:
        interpreter.run_python(*arguments, on_line=on_line)
    finally:
        board.end()
        has_ended = True
        show(now=True)
    return board, show


def read_working_script():
    try:
        return read_regular(WORKING_COPY)
    except OSError:
        return None


@in_one_line
def beside(stage):
    """Links: to the script, and to a workspace that puts it beside this."""
    require_lesson(stage)
    path = show_path(WORKING_COPY)
    lines = [f'<a href="../{path}">{path}</a>: opens your script in a tab '
             "(drag the tab to the left)"]
    root = following.server_root()
    if root:
        # else there can be no file here, or none that JupyterLab shows
        with contextlib.suppress(OSError, ValueError):
            link = lab.write_workspace(stage, root=root).name
            lines.append(f'<a href="{link}">Script and lesson side by side'
                         "</a>: opens both anew (save first)")
    return Shown(page.styled_box("".join(map(paragraph, lines))),
                 f"Your script is {path}")


@in_one_line
def apply(stage, *numbers):
    """Make changes for me, by their numbers, or "all" that are left."""
    find_stage(stage)
    require(numbers, f'no changes are named; fix: apply("{stage}", 3) makes '
            f'change 3, apply("{stage}", "all") all that are left')
    if numbers == ("all",):
        numbers = ()
    require(all(isinstance(number, int) for number in numbers),
            'a change is not a number; fix: name changes by their numbers, '
            'or "all"')
    require_originals()
    return how_to_reload(working_copy.apply_changes, stage, numbers)


@in_one_line
def reset(name=""):
    """Start from a stage, or from a backup by its date; mine is kept.

    Without a name it says which there are.
    """
    if name:
        require_originals()
        return how_to_reload(working_copy.reset_to, name)
    return output_of(working_copy.list_all)


@in_one_line
def undo():
    """Go back to the previous version of my script; twice undoes that."""
    return how_to_reload(working_copy.restore_previous)


def how_to_reload(function, *args):
    """What it prints; how to see the new script stands out."""
    text = output_of(function, *args).text
    reopen = working_copy.REOPEN
    return show_text(text.replace(reopen, f"**{reopen}**"))


def drawing(name):
    """A function for a cell, which shows that drawing."""
    def show():
        return picture(pictures.read_drawing(name))

    show.__name__ = name
    return in_one_line(show)


cadence, data_parallel, nodes, samples_read, strategies, tied, words = map(
    drawing, ("cadence", "data_parallel", "nodes", "samples_read",
              "strategies", "tied", "words"))


# -------------------------------------------------------------- start_here


@in_one_line
def doctor():
    """Check that this machine has what the course needs."""
    os.environ.update(interpreter.sbatch_variables())
    run_and_show("-m", "workshop", "doctor")


@in_one_line
def journey():
    """What I have done so far, and what comes next."""
    line, lessons = working_copy.next_lessons()
    links = [f'<a href="diff_{name}.ipynb">{name}</a>' for name in lessons]
    rows = [("lesson", "it makes", "check passed", "runs"),
            *working_copy.lesson_rows()]
    return Shown(page.styled_box(
        paragraph(f"<strong>{page.quote(line)}</strong> "
                  + ", ".join(links))
        + table(rows, "words")), " ".join([line, *lessons]))


@in_one_line
def train(*flags):
    """Run `python code/train_gpt2.py flags...` in the workshop's Python."""
    backups.read_script_bytes(WORKING_COPY)  # a FIFO would be waited for
    status = run_and_show(str(WORKING_COPY), *flags)
    require(status == 0, "the training did not come to its end: what it "
            "printed says why")


@in_one_line
def gpus():
    """Show what this machine's GPUs are doing now."""
    for command in (
            "nvidia-smi --format=csv --query-gpu=index,name,utilization.gpu,"
            "memory.used,memory.total,power.draw",
            "xpu-smi dump -d -1 -m 0,1,18 -n 1",
            "amd-smi monitor -pum --csv"):
        if shutil.which(command.split()[0]):
            run = subprocess.run(command.split(), capture_output=True,
                                 text=True, check=False)
            require(run.returncode == 0, (run.stderr or run.stdout).strip())
            rows = [line.split(",") for line in run.stdout.splitlines()]
            return Shown(page.styled_box(table(rows)), run.stdout)
    return show_text("There is no GPU here (none of nvidia-smi, xpu-smi, "
                     "amd-smi): all lessons also work on the CPU (the one on "
                     "Triton needs Linux), and a batch job "
                     "may have a GPU.")


# --------------------------------------------------------- one lesson each


@in_one_line
def occupancy():
    """What a GPU has to keep for each of the stage's kernels."""
    run_and_show("-m", "notebooks.experiments.kernels")


def load_extension():
    """What `%load_ext lesson` does besides defining the magics."""
    if following.pulse():
        script = Shown(page.texts(following.pulse()), "")
        frontend.LiveOutput(script.bundle())
    magics.warm.start()


@in_one_line
def verify(script, mistake=0, *flags):
    """Check that the script trains the same as two processes as one.

    script: your own with its flags, or the number of the lesson's edits to
    make in its script, with one of the mistakes of "Break it".
    """
    if isinstance(script, str):
        on_board("-m", "workshop", "verify", "--events", "--",
                 *split_arguments(script), follows_script=False)
    else:
        require(isinstance(script, int) and isinstance(mistake, int), "name "
                "your script, or the edits and the mistake by their numbers")
        on_board("-m", "notebooks.experiments.your_model", str(script),
                 str(mistake), *flags, follows_script=False)


@in_one_line
def torchrun(*arguments):
    """Run `torchrun --standalone arguments...`."""
    run_and_show("-m", "torch.distributed.run", "--standalone", *arguments)


@in_one_line
def export(run, folder):
    """Write a run's newest checkpoint in Hugging Face's format."""
    run_and_show("code/huggingface.py", "export", run, folder)


@in_one_line
def decisions():
    """When to divide what, with a number in each row."""
    return as_table([("when", "take", "GPT-2 XL on 2 x 4 GPUs of 80 GB"),
                     *arithmetic.averaging_rules()], "words")


@in_one_line
def experiment(name):
    """Run one of notebooks/experiments/batch.py's trainings, and draw it."""
    return measured("batch", name)


def measured(module, name):
    """Run an experiment of this name; the picture that it draws, if any."""
    drawn = drawn_by(f"notebooks.experiments.{module}", name)
    return picture(drawn) if drawn else None


def drawn_by(module, *arguments):
    """What `python -m MODULE` writes into its last argument, a file; or "".
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "picture.svg")
        run_and_show("-m", module, *arguments, str(output))
        return output.read_text("utf-8") if output.exists() else ""


@in_one_line
def bills(loss):
    """A table: the same loss with more GPUs, in steps, time, GPU-hours."""
    require(isinstance(loss, (int, float)) and 0.1 <= loss <= 20,
            "the loss is a number, in nats per token, such as 3.3")
    return as_table([("A100s", "tokens in a minibatch", "steps", "minutes",
                      "GPU-hours"), *arithmetic.cost_rows(loss)])


@in_one_line
def step(name):
    """Measure a way to train on one device: the table, and a picture.

    name: of notebooks/experiments/one_gpu.py's STEPS, or "limit".
    """
    return measured("one_gpu", name)


# ----------------------------------------------------------------- results


@in_one_line
def runs(*folders):
    """A table of the runs in the pictures, and which runs are left out."""
    found, notes = results.find_runs([*map(str, folders)])
    rows: list[tuple[Any, ...]] = [
        ("run", "stage", "device", "steps", "last loss", "tokens/s",
         "GiB on rank 0", "MB sent a step")]
    rows += [(show_path(run.folder), run.name, run.device, len(run.rows),
              f"{run.rows[-1]['loss']:.4f}", f"{run.tokens_per_second:,.0f}",
              "?" if run.memory is None else f"{run.memory / 2**30:.1f}",
              "?" if run.sent is None else f"{run.sent / 1e6:,.2f}")
             for run in found]
    presets = sorted({run.preset for run in found})
    notes = [f"Preset {', '.join(presets)}.", *notes, *(
        f"{show_path(run.folder)}: {text}." for run in found
        if (text := results.describe_run_start(run.folder)))]
    return as_table(rows, notes=notes)


@in_one_line
def scaling_limit(*folders):
    """How many devices DDP can keep busy: this run's, and two GPUs'."""
    found, _ = results.find_runs([*map(str, folders)])
    run = min(found, key=lambda run: run.world_size)  # it waits least
    rows = [("device", "TFLOP/s", "GB/s", "tokens, at least",
             "tokens in a step", "devices")]
    rows += [(limit.device, f"{limit.flops / 1e12:.3g}",
              f"{limit.bandwidth / 1e9:.3g}", f"{limit.tokens:,.0f}",
              f"{limit.minibatch:,}", f"{int(limit.devices):,}")
             for limit in scaling_limits(run)]
    notes = []
    if not measured_speeds():
        notes = [f"{arithmetic.LINK / 1e9:.0f} GB/s are those of one link of "
                 "InfiniBand HDR. In a job on several nodes, `python -m "
                 "workshop doctor --ranks` measures yours."]
    return as_table(rows, notes=notes)


@in_one_line
def plot(panel, *folders):
    """One panel of the picture that `python -m workshop plot` makes."""
    # finds errors without starting a process
    results.find_runs([*map(str, folders)])
    drawn = drawn_by("workshop.results.plot", panel, *(
        str(Path(str(name)).resolve()) for name in folders))
    require(drawn, "there is no picture: what is printed says why")
    return picture(drawn) if drawn.startswith("<svg") else show_text(
        f"There is no picture yet: {drawn}.")
