"""The functions that the cells of the lessons call.

They work in any kernel: whatever needs torch runs in the course's own
interpreter. An error is shown as one line.
"""

import _thread
import atexit
import contextlib
import functools
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from backstage import ROOT
from backstage.errors import UserError, require
from backstage.files import show_path
from workshop import arithmetic, classroom, interpreter, lab
from workshop.check.board import Board
from workshop.doctor import ask_slurm
from workshop.journey import done, what_next
from workshop.lesson import checked, desk, render
from workshop.lesson.diff import Diff, Script
from workshop.notebook import pictures, printed
from workshop.rehearse import COMPLAINT
from workshop.results import runs as results
from workshop.stages import DESK, batch_files, find


class Shown:
    """Something that a notebook shows as HTML, and a terminal as text.

    more: what else the notebook keeps of it, by the kind.
    """

    def __init__(self, html, text, **more):
        self.html, self.text, self.more = html, text, more

    def _repr_html_(self):
        return self.html

    def _repr_mimebundle_(self, **kwargs):
        return self.more

    def __repr__(self):
        return self.text


def complaint(error):
    """What went wrong, in one line."""
    line = render.paragraph(render.quote(str(error)), "bad")
    text = render.as_calls(str(error))
    return Shown(render.box(line, str(error)), text, **{COMPLAINT: text})


def said(text, status="", above="", most=None):
    """Lines of text: JupyterLab would wrap printed ones inside of words.

    above: HTML that stands over them. most: as `printed.to_html` has it.
    """
    text = text.rstrip()
    return Shown(render.box(above + printed.to_html(text, most), status),
                 render.as_calls(text))


def said_by(function, *args):
    """What the function prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*args)
    return said(out.getvalue())


def said_meanwhile(*arguments, view=said):
    """Run `python arguments...`, and show what it prints as it comes.

    view: of the text, and of its last line. Returns its exit status.
    """
    lines = []
    show = live(lambda: view("".join(lines), "".join(lines[-1:]).strip()))

    def on_line(line):
        lines.append(line)
        show()

    status = interpreter.run(*arguments, on_line=on_line)
    if lines:
        show(now=True)
    return status


def in_one_line(function):
    """Let a cell show what the user can fix, instead of a traceback."""
    @functools.wraps(function)
    def call(*args, **options):
        try:
            return function(*args, **options)
        except UserError as error:
            return complaint(error)
    return call


def picture(svg):
    """An SVG picture, for a notebook."""
    return Shown(render.box(svg + render.KEEP_IN_SIGHT), "(a picture)")


# ------------------------------------------------------------ every lesson


@functools.lru_cache(1)  # a site.sh may load modules, which takes seconds
def site_variables():
    """What site.sh exports; the class's folder then is this kernel's, too."""
    found = interpreter.site_variables()
    if found.get("WORKSHOP_CLASS"):
        os.environ["WORKSHOP_CLASS"] = found["WORKSHOP_CLASS"]
    return found


@in_one_line
def compare(first, then):
    """The changes from one stage's solution to another's."""
    old, new = (find(stage).solution.read_text() for stage in (first, then))
    return Shown(*render.between(old, new))


@in_one_line
def diff(stage, hints=None, all=False):
    """What is left to change in your script, and why; anew at each save.

    hints: whether the code stays folded; left out, it is as site.sh says.
    all: all of it at once, without the reasons, as git shows it.
    """
    site = site_variables()
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

    return follow_script(view)


followed = None  # the view that is shown anew; there is one at a time


def follow_script(view):
    """Show view() in the cell, and again whenever the script is saved.

    Returns view() where nothing can be shown again, outside of a notebook.
    """
    global followed
    followed, seen = view, saved_at()
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return view()
    if get_ipython() is None:
        return view()
    handle = display(alive(view()), display_id=True)

    def follow():
        for is_new in saves(seen):
            if followed is not view:
                return
            if is_new:
                handle.update(alive(view()))

    threading.Thread(target=follow, daemon=True).start()
    return None


def alive(shown):
    """The same, with words that appear when it is not shown anew any more."""
    path = pulse()
    if not path:
        return shown
    return Shown(render.stale(path) + shown.html, shown.text)


@functools.lru_cache(1)
def pulse():
    """Begin to write the time into a file, for views that follow this kernel.

    Returns its path in JupyterLab, or "" if it can have none.
    """
    file = ROOT / "notebooks" / "__pycache__" / f"alive-{os.getpid()}"

    def beat():
        while True:
            with contextlib.suppress(OSError):
                file.write_text(str(time.time()))
            time.sleep(0.5)

    try:
        path = file.resolve().relative_to(server_root() or "").as_posix()
        file.parent.mkdir(exist_ok=True)
        file.touch()
    except (OSError, ValueError):
        return ""
    atexit.register(file.unlink, missing_ok=True)
    threading.Thread(target=beat, daemon=True).start()
    return path


def saves(seen):
    """Looks again and again, and yields whether the script was saved.

    seen: `saved_at()` of what was shown last.
    """
    before = seen
    while True:
        now = saved_at()
        # Seen twice: an editor empties a file before it writes it.
        yield now == before != seen
        if now == before:
            seen = now
        before = now
        time.sleep(0.15)


def saved_at():
    """What changes whenever the script is saved, or has passed a check."""
    states = []
    for path in (DESK, checked.RECORD):
        with contextlib.suppress(OSError):
            it = path.stat()
            states.append((path, it.st_mtime_ns, it.st_size, it.st_ino))
    return states


@in_one_line
def check(stage, change=None):
    """Compare your script with the single-device stage, on real processes.

    Shows a table that fills while the check runs. change: the number of a
    change, to try it alone, as it is in your script, with all others made;
    or "next", the first that is left.
    """
    site_variables()
    if change == "next":
        change = next((item.number for item in Diff(stage).left
                       if item.number), None)
        require(change, f'no change is left: check("{stage}") tries them all')
    seen, script = saved_at(), read_script()
    board, show = on_board("-m", "workshop", "check", "--events", stage,
                           *([] if change is None else [str(change)]),
                           link=render.link_lines)

    def follow():
        for is_new in saves(seen):
            if is_new and read_script() != script:
                board.is_old = True
                return show(now=True)

    threading.Thread(target=follow, daemon=True).start()


def on_board(*arguments, link=str):
    """Run `python arguments...`, and show the events that it prints.

    link: a function that makes links in the HTML. Returns the `Board`, and the
    function that shows it anew.
    """
    board = Board()
    show = live(lambda: alive(Shown(
        render.box(link(board.to_html(check_pictures(board)))
                   + render.KEEP_IN_SIGHT * (board.right is not None
                                             and not board.is_old),
                   board.last), board.to_text())))
    board.update({"say": "The processes start, which takes some seconds."})
    show(now=True)

    def on_line(line):
        board.read(line)
        show()

    try:
        interpreter.run(*arguments, on_line=on_line)
    finally:
        board.end()
        show(now=True)
    return board, show


def read_script():
    try:
        return DESK.read_bytes()
    except OSError:
        return None


def check_pictures(board):
    """The pictures beside the table, as far as there are any."""
    drawn = []
    last = [*board.pictures.values()][-1:]
    drawn += [pictures.reads(seen["expected"], seen["read"], seen["readers"])
              for seen in last if any(seen["read"])]
    losses = {name: seen["loss"] for name, seen in board.pictures.items()
              if seen["loss"]}
    if losses:
        drawn.append(pictures.errors(last[0]["single"], losses))
    return f"<div>{''.join(drawn)}</div>" if drawn else ""


def live(make):
    """A function that shows make() in the cell, each time in its own place.

    It does so a few times a second at most, but always with now=True.
    """
    from IPython.display import display

    handle, last = None, 0.0

    def show(now=False):
        nonlocal handle, last
        if not now and time.monotonic() - last < 0.3:
            return
        last = time.monotonic()
        if handle is None:
            handle = display(make(), display_id=True)
        else:
            handle.update(make())

    return show


def beside(stage):
    """Links: to the script, and to a workspace that puts it beside this."""
    path = show_path(DESK)
    lines = [f'<a href="../{path}">{path}</a>: opens your script in a tab '
             "(drag the tab to the left)"]
    workspace = write_workspace(stage)
    if workspace:
        lines.append(f'<a href="{workspace}">Script and lesson side by side'
                     "</a>: opens both anew (save first)")
    return Shown(render.box("".join(map(render.paragraph, lines))),
                 f"Your script is {path}")


def write_workspace(stage):
    """Write a workspace for the root that JupyterLab shows.

    Returns the link from a lesson to it, or "" if there can be none.
    """
    root = server_root()
    if root is None:
        return ""
    try:
        return lab.write_workspace(stage, root=root).name
    except (OSError, ValueError):  # no file here, or none that it shows
        return ""


def server_root():
    """The folder whose files JupyterLab shows, or None if nothing tells."""
    try:
        from jupyter_core.paths import jupyter_runtime_dir

        record = Path(jupyter_runtime_dir(),
                      f"jpserver-{os.environ['JPY_PARENT_PID']}.json")
        return Path(json.loads(record.read_text())["root_dir"]).resolve()
    except (ImportError, KeyError, OSError, ValueError):
        return None


@in_one_line
def apply(stage, *numbers):
    """Make changes for me, by their numbers, or "all" that are left."""
    require(numbers, f'which changes? apply("{stage}", 3) makes change 3, '
            f'apply("{stage}", "all") all that are left')
    if numbers == ("all",):
        numbers = ()
    require(all(isinstance(number, int) for number in numbers),
            'name changes by their numbers, or "all"')
    return how_to_reload(desk.apply, stage, numbers)


@in_one_line
def reset(name=""):
    """Start from a stage, or from a backup by its date; mine is kept.

    Without a name it says which there are.
    """
    return how_to_reload(desk.reset, name) if name else said_by(desk.list_all)


@in_one_line
def undo():
    """Go back to the previous version of my script; twice, and it is back."""
    return how_to_reload(desk.undo)


def how_to_reload(function, *args):
    """What it prints; how to see the new script stands out."""
    text = said_by(function, *args).text
    return said(text.replace(desk.REOPEN, f"**{desk.REOPEN}**"))


# ------------------------------------------------------------------- SLURM


def no_slurm():
    """Why the cells that submit jobs do nothing."""
    if shutil.which("qsub"):
        return ("These cells are for SLURM, but PBS is here: submit the job "
                "in a terminal, as batchfiles/README.md shows.")
    return ("There is no SLURM on this machine, so the cells that submit jobs "
            "do nothing. Read on: on a cluster's login node or in its portal "
            "they work.")


def slurm():
    """Say whether SLURM is here, and what the site asks for."""
    if shutil.which("sbatch") is None:
        return complaint(no_slurm())
    os.environ.update(interpreter.sbatch_variables())
    try:
        answer = ask_slurm()
    except UserError as error:
        return complaint(error)
    return Shown(render.box(render.paragraph(render.quote(answer))), answer)


@in_one_line
def submit(name, flags="", options=""):
    """Submit batchfiles/batch-NAME.sh, after a question.

    flags: for the script, and options: for sbatch, such as --nodes=2, both as
    on the command line. Nobody answers where the notebook runs by itself, and
    nothing is submitted.
    """
    require(shutil.which("sbatch"), no_slurm())
    names = batch_files()
    require(name in names, f"there is no batch file {name}: choose from "
            f"{', '.join(names)}")
    os.environ.update(interpreter.sbatch_variables())
    ask_slurm()  # if it refuses, there is nothing to ask
    command = " ".join(filter(
        None, ["sbatch", options, f"batch-{name}.sh", flags]))
    sure = answer(f"Submit a job, `{command}`? [y/N] ")
    if sure.strip().lower() not in ("y", "yes"):
        return said(f"Nothing is submitted: `{command}` needs a y.\nIf "
                    "JupyterLab runs no other cell, press Enter in the "
                    "box above.")
    return ask("sbatch", *shlex.split(options),
               ROOT / "batchfiles" / f"batch-{name}.sh", *shlex.split(flags))


def answer(question, seconds=60):
    """What is answered; "" if nothing is, as in Run > Run All Cells."""
    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    try:
        return input(question)
    except (EOFError, KeyboardInterrupt, NotImplementedError, RuntimeError):
        return ""
    finally:
        timer.cancel()


@in_one_line
def queue():
    """My jobs: PD waits, with the reason; R runs, with its nodes."""
    require(shutil.which("squeue"), no_slurm())
    ask_slurm()  # what squeue says of a wrong configuration is long
    # as wide as a lesson beside the script
    return ask("squeue", "--me", "-o", "%.8i %.12j %.2t %.8M %R")


def ask(*command):
    """What a program of SLURM's says; a `UserError` if it fails."""
    end = subprocess.run(command, capture_output=True, text=True, check=False)
    require(end.returncode == 0, (end.stderr or end.stdout).strip())
    return said(end.stdout + end.stderr)


@in_one_line
def log(lines=8):
    """My newest job's log: its first lines, some steps, its last lines.

    lines: how many are shown at first, and twice as many at the end.
    """
    logs = [path for folder in {Path.cwd(), ROOT}
            for path in folder.glob("slurm-*.out")
            if path.stat().st_uid == os.getuid()]
    require(logs, "no job of yours has written a log yet (slurm-*.out): it "
            "begins where the job begins. example-logs/job.txt is one to read")
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    return said(f"{show_path(newest)}:\n"
                + newest.read_text("utf-8", "replace"), most=lines)


# ---------------------------------------------------------------- pictures


def drawn(draw):
    """A function for a cell, which shows that picture."""
    return functools.wraps(draw)(lambda: picture(draw()))


cadence, data_parallel, nodes, samples_read, strategies, words = map(drawn, (
    pictures.cadence, pictures.data_parallel, pictures.nodes,
    pictures.samples_read, pictures.strategies, pictures.words))


# -------------------------------------------------------------- start_here


@in_one_line
def doctor():
    """Does this machine have everything the workshop needs?"""
    os.environ.update(interpreter.sbatch_variables())
    said_meanwhile("-m", "workshop", "doctor")


@in_one_line
def journey():
    """What I have done so far, and what comes next."""
    words, lessons = what_next()
    links = [f'<a href="diff_{name}.ipynb">{name}</a>' for name in lessons]
    rows = [("lesson", "it makes", "check passed", "runs"), *done()]
    return Shown(render.box(
        render.paragraph(f"<strong>{render.quote(words)}</strong> "
                         + ", ".join(links))
        + printed.table(rows, "words")), " ".join([words, *lessons]))


@in_one_line
def script_map():
    """The sections, classes and functions of the script on the desk."""
    script = Script(DESK)
    require(script.tree, f"{show_path(DESK)} is not Python yet: "
            f"{script.syntax_error or 'it is nested too deeply'}")
    rows = pictures.script_map("".join(script.raw), f"../{show_path(DESK)}")
    return Shown(render.box(rows), "(a map of the script)")


@in_one_line
def train(*flags):
    """Run `python code/train_gpt2.py flags...` in the workshop's Python."""
    require(DESK.exists(), f"{show_path(DESK)} is not there: was it moved? "
            "`python -m workshop reset std` makes a new one")
    status = said_meanwhile(str(DESK), *flags)
    require(status == 0, "the training did not come to its end: what it "
            "printed says why")


@in_one_line
def gpus():
    """Show what this machine's GPUs are doing now."""
    for command in (
            "nvidia-smi --format=csv --query-gpu=index,name,utilization.gpu,"
            "memory.used,memory.total,power.draw",
            "xpu-smi dump -d -1 -m 0,1,18 -n 1"):
        if shutil.which(command.split()[0]):
            run = subprocess.run(command.split(), capture_output=True,
                                 text=True, check=False)
            require(run.returncode == 0, (run.stderr or run.stdout).strip())
            rows = [line.split(",") for line in run.stdout.splitlines()]
            return Shown(render.box(printed.table(rows)), run.stdout)
    return said("There is no GPU here (neither nvidia-smi nor xpu-smi):\nall "
                "lessons work on the CPU, and a batch job may have a GPU.")


# ------------------------------------------------------------- collectives


def ranks(line, cell):
    """%%ranks [N [SECONDS]]: run the cell as N processes; draw what it shows.

    SECONDS: how long a collective waits for the others.
    """
    from IPython.display import display

    try:
        run_ranks(cell, *(line.split() or ["4"]))
    except UserError as error:
        display(complaint(error))


def mpi(line, cell):
    """%%mpi [N [SECONDS]]: run the cell as N ranks of MPI, by mpirun.

    SECONDS: after which all are ended, if they wait for one another.
    """
    from IPython.display import display

    try:
        number, seconds, *_ = [*(line.split() or ["4"]), "20"]
        run_ranks(cell, number, seconds, mpirun=True)
    except UserError as error:
        display(complaint(error))


class Warm:
    """The program that runs this kernel's `%%ranks`, with torch imported."""

    process = None

    def start(self):
        """Start it, if it is not there. Raises `UserError`."""
        if self.process is None or self.process.poll() is not None:
            self.process = interpreter.start("-m", "workshop.notebook.ranks")

    def ask(self, request):
        """Its answers to a request, as they come."""
        self.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                try:
                    answer = json.loads(line)
                except ValueError:  # a complaint of Python's own
                    answer = {"line": line.rstrip()}
                yield answer
                if "line" not in answer:
                    return
            yield {"error": "the processes have ended: run the cell again"}
        except KeyboardInterrupt:  # the kernel's stop button
            self.process.kill()  # what it has started ends with it
            yield {"error": "interrupted"}
        except OSError as error:
            yield {"error": f"the processes have ended ({error}): run the "
                   "cell again"}


warm = Warm()


def run_ranks(cell, number, seconds="20", mpirun=False):
    name = "%%mpi" if mpirun else "%%ranks"
    require(number.isdigit() and 1 <= int(number) <= 8 and seconds.isdigit(),
            f"write {name} N or {name} N SECONDS, with N from 1 to 8")
    who = pictures.plural(int(number), "process", "es")
    words = f"{who} at work ..."
    state, show = said(words, words), live(lambda: state)
    begin, lines = time.monotonic(), []
    show(now=True)
    # line 1 has %%ranks, so that errors name the lines that one sees
    for answer in warm.ask({"cell": "\n" + cell, "ranks": int(number),
                            "seconds": int(seconds), "mpirun": mpirun}):
        if "line" in answer:
            lines.append(answer["line"])
        elif "error" in answer:
            state = complaint(" ".join([*lines, answer["error"]]))
        else:
            drawn = [draw(answer[what]) for what, draw in (
                ("events", pictures.timeline), ("shown", pictures.tensors))
                if any(answer[what])]
            words = f"{who}, {time.monotonic() - begin:.1f} s"
            state = said("\n".join([*lines, words]), words, "".join(
                [*drawn, answer["svg"] or "", render.KEEP_IN_SIGHT]))
    show(now=True)


planted = []  # the program that runs a job with a fault, and its folder


@in_one_line
def plant(number):
    """Run their script with this fault; show at first what it prints."""
    require(number in range(1, 10), "there are the faults 1 to 9")
    unplant()
    folder = tempfile.mkdtemp(prefix="why-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = interpreter.start(
        "-m", "workshop.notebook.hangs", str(number), folder)
    planted[:] = program, folder
    state, lines = "4 processes start, which takes some seconds.", []
    show = live(lambda: said(state))
    show(now=True)
    for line in itertools.chain(program.stdout, ["..\n"]):
        if line not in (".\n", "..\n"):
            lines.append(line)
            continue
        state, lines = "".join(lines) or state, []
        show(now=True)
        if line == "..\n":
            break


@in_one_line
def why():
    """Ask why that job hangs, has died or is slow."""
    require(planted, "plant a fault first: plant(1)")
    said_meanwhile("-m", "workshop", "why", planted[1], view=reason)


def reason(text, last):
    """What `why` prints: what is wrong, what to try, the evidence folded."""
    answer, *evidence = re.split("^(?=  )", text, maxsplit=1, flags=re.M)
    lines = render.quote(answer).splitlines()
    # the last one: before, it may say that it looks again
    fault = [line for line in lines if not line.startswith("try: ")][-1]
    kind = "good" if fault.startswith("nothing is wrong") else "bad"
    out = [render.paragraph(f"<strong>{fault}</strong>", kind),
           *map(render.paragraph, lines[lines.index(fault) + 1:]),
           *(render.folded("The evidence", printed.to_html(part))
             for part in evidence)]
    return Shown(render.box("".join(out), last), text)


@in_one_line
def occupancy():
    """What a GPU has to keep for each of the stage's kernels."""
    said_meanwhile("-m", "workshop.notebook.kernels")


def unplant():
    """End the job that runs with a fault, if there is one."""
    if planted:
        planted[0].stdin.close()
        planted[0].wait()


def load_ipython_extension(ipython):
    """Called by `%load_ext workshop.notebook.cells`."""
    ipython.register_magic_function(ranks, "cell")
    ipython.register_magic_function(mpi, "cell")
    if pulse():
        from IPython.display import display

        display(Shown(render.texts(pulse()), ""))
    with contextlib.suppress(UserError):  # the first cell will tell
        warm.start()


# -------------------------------------------------------------- your_model


@in_one_line
def verify(script, mistake=0, *flags):
    """Does the script train as two processes as it does as one?

    script: your own with its flags, or the number of the lesson's edits to
    make in its script, with one of the mistakes of "Break it".
    """
    if isinstance(script, str):
        on_board("-m", "workshop", "verify", "--events", "--",
                 *shlex.split(script))
    else:
        on_board("-m", "workshop.notebook.your_model", str(script),
                 str(mistake), *flags)


@in_one_line
def torchrun(*arguments):
    """Run `torchrun --standalone arguments...`."""
    said_meanwhile("-m", "torch.distributed.run", "--standalone", *arguments)


@in_one_line
def export(run, folder):
    """Write a run's newest checkpoint in Hugging Face's format."""
    said_meanwhile("-m", "workshop", "export", run, folder)


# ---------------------------------------------------------------- sharding


def decisions():
    """When to divide what, with a number in each row."""
    rows = [("when", "take", "GPT-2 XL on 2 x 4 GPUs of 80 GB"),
            *arithmetic.decisions()]
    return Shown(render.box(printed.table(rows, "words")),
                 "\n".join(map("; ".join, rows)))


# ------------------------------------------------------- larger minibatches


def experiment(name):
    """Run one of workshop/notebook/batch.py's trainings, and draw it."""
    return measured("batch", name)


@in_one_line
def measured(module, name):
    """Run workshop/notebook/MODULE.py; the picture that it draws, if any."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "picture.svg")
        said_meanwhile("-m", f"workshop.notebook.{module}", name, str(output))
        return picture(output.read_text("utf-8")) if output.exists() else None


def bills(loss):
    """A table: the same loss with more GPUs, in steps, time, GPU-hours."""
    rows = [("A100s", "tokens in a minibatch", "steps", "minutes",
             "GPU-hours"), *arithmetic.bills(loss)]
    return Shown(render.box(printed.table(rows)), "\n".join(
        "  ".join(map(str, row)) for row in rows))


# ------------------------------------------------------------- one device


def step(name):
    """Measure a way to train on one device: the table, and a picture.

    name: of workshop/notebook/one_gpu.py's STEPS, or "limit".
    """
    return measured("one_gpu", name)


# ----------------------------------------------------------------- results


@in_one_line
def runs(*folders):
    """A table of the runs in the pictures, and which runs are left out."""
    found, notes = results.find(folders)
    rows = [("run", "stage", "device", "steps", "last loss", "tokens/s",
             "GiB on rank 0", "MB sent a step")]
    rows += [(show_path(run.folder), run.name, run.device, len(run.rows),
              f"{run.rows[-1]['loss']:.4f}", f"{run.tokens_per_second:,.0f}",
              "?" if run.memory is None else f"{run.memory / 2**30:.1f}",
              "?" if run.sent is None else f"{run.sent / 1e6:,.2f}")
             for run in found]
    presets = sorted({run.preset for run in found})
    notes = [f"Preset {', '.join(presets)}.", *notes]
    lines = [render.paragraph(render.quote(note)) for note in notes]
    text = "\n".join([*notes, *("  ".join(map(str, row)) for row in rows)])
    return Shown(render.box(printed.table(rows) + "".join(lines)), text)


@in_one_line
def plot(panel, *folders):
    """One panel of the picture that `python -m workshop plot` makes."""
    results.find(folders)  # finds errors without starting a process
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "panel.svg")
        said_meanwhile("-m", "workshop.results.plot", str(output), panel,
                       *(str(Path(name).resolve()) for name in folders))
        require(output.exists(), "there is no picture: what is printed says "
                "why")
        drawn = output.read_text("utf-8")
        return picture(drawn) if drawn.startswith("<svg") else said(
            f"There is no picture yet: {drawn}.")
