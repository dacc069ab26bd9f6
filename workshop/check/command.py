"""The check: trials on each mesh of a stage, and one diagnosis."""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
import tokenize
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path

from backstage.errors import UserError, require
from backstage.files import show_path
from workshop import classroom, processes
from workshop.check.board import Board
from workshop.lesson import checked, documents
from workshop.lesson.diff import Diff
from workshop.stages import DESK, FIRST, STAGES

LARGEST = 1_000_000  # bytes of a script
references = {}  # script -> Trial


def main(stage, script=DESK, verbose=False, events=False, change=None):
    """Check a script; returns whether it is right. Prints as it goes.

    verbose: with every question, and what follows from a mistake. events:
    in JSON, for a `Board` elsewhere. change: the number of a change of the
    lesson, to try it alone, as it is in the script: quickly, on two processes,
    and with all the others made.
    """
    out = Events() if events else Terminal()
    with Ending() as ending:
        yours = data = read_script(script)
        if change is not None:
            data = make_others(stage, script, yours, change, out.say)
            if data is None:
                out.report(right=True)
                return True
        # it imports torch while this process does
        processes.get_server(processes.modules_of(stage))
        from workshop.check import trial

        ending.folder = trial.name_folder()
        ending.folder.mkdir(mode=0o700)
        try:
            bench = trial.Bench(ending.folder, stage, script, data, out.say)
            check = Check(bench, verbose, out, change,
                          lines_as_in(yours, data))
            right = check.run()
        finally:
            remove(ending.folder)
    if change is None:
        if right:
            checked.record(stage, data)
        title = check.wrong[0][0] if check.wrong else ""
        classroom.note(stage, right=right, mistake=title)
    return right


def read_script(script):
    """Its bytes, read once: what is saved meanwhile is not mixed in."""
    script = Path(script)
    try:
        size = script.stat().st_size
        require(size <= LARGEST, f"{show_path(script)}: {size / 1e6:.0f} MB "
                "are too large for a script: is it another file?")
        data = script.read_bytes()
        ast.parse(data, script.name)
    except FileNotFoundError:
        raise UserError(
            f"{show_path(script)} is not there: was it moved? `python -m "
            "workshop reset std` puts a new one in its place") from None
    except OSError as error:
        raise UserError(f"{show_path(script)}: {error.strerror}") from error
    except (SyntaxError, ValueError, RecursionError) as error:
        where = getattr(error, "lineno", None)
        raise UserError(f"{show_path(script)}: "
                        + (f"line {where}: " if where else "")
                        + f"{getattr(error, 'msg', error)}") from error
    return data


def make_others(stage, script, data, change, say):
    """The script with all changes but this one made, as the lesson has them.

    None if this one is made so, too.
    """
    diff = Diff(stage, script, data)
    diff.require_change(change)
    left = {item.number: item for item in diff.left}
    if change not in left:
        say(f"Change {change} is made as the lesson has it.")
        return None
    say(f"Change {change} ({left[change].title}) as it is in your script, "
        "with all others made:")
    data = diff.apply(left.keys() - {change}).encode()
    try:
        ast.parse(data)
    except SyntaxError as error:
        raise UserError(
            f"lines of yours are in the way of the other changes: `python -m "
            f"workshop diff {stage}` shows them") from error
    return data


def lines_as_in(yours, tried):
    """A function of a text that names lines of the script that was tried.

    It names them as lines of the attendee's script, and quotes those that are
    not there.
    """
    yours, tried = (data.decode("utf-8", "replace").splitlines()
                    for data in (yours, tried))
    same = {a + k + 1: b + k + 1 for a, b, size in SequenceMatcher(
        None, tried, yours, autojunk=False).get_matching_blocks()
            for k in range(size)}

    def name(line):
        number = int(line[1])
        if number in same or not 0 < number <= len(tried):
            return f"line {same.get(number, number)}"
        return f"the lesson's line `{tried[number - 1].strip()}`"

    return lambda text: re.sub(r"\bline (\d+)\b", name, text)


class Terminal:
    """Prints lines, and the table at the end."""

    more = " With -v it tells all that it saw."

    def __init__(self):
        self.board = Board()
        self.tty = sys.stdout.isatty()
        self.width = shutil.get_terminal_size().columns if self.tty else 79

    def say(self, text=""):
        """Print a line; in a terminal a long one is wrapped between words."""
        for line in text.split("\n"):
            if self.tty:
                indent = " " * (len(line) - len(line.lstrip()))
                if line.startswith(("  FAIL", "  warn", "  and", "  ok")):
                    indent = " " * 8
                line = textwrap.fill(
                    line, self.width, subsequent_indent=indent,
                    break_long_words=False, break_on_hyphens=False)
            print(line, flush=True)

    def report(self, **event):
        self.board.update(event)

    def show_table(self):
        colour = self.tty and "NO_COLOR" not in os.environ
        self.say()
        print(self.board.to_text(colour, self.width), flush=True)
        self.say()


class Events:
    """Prints events, a line of JSON for each."""

    more = ""

    def say(self, text=""):
        self.report(say=text)

    def report(self, **event):
        print(json.dumps(event), flush=True)

    def show_table(self):
        pass


class Quiet:
    """Prints nothing."""

    def say(self, text=""):
        pass

    report = show_table = lambda self, **event: None


class Ending:
    """Ends everything at once on Ctrl-C, SIGTERM, or a closed terminal.

    An exception would be lost where Python cannot raise one, as in a clean-up
    or while a module of torch is imported: the handler itself ends the
    processes, removes the folder, and leaves.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self):
        self.folder, self.before = None, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self.before[number] = signal.signal(number, self.leave)
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def leave(self, number, frame):
        for other in self.before:
            signal.signal(other, signal.SIG_IGN)
        with contextlib.suppress(Exception):
            processes.end_all()
        with contextlib.suppress(Exception):
            remove(self.folder)
        with contextlib.suppress(Exception):
            os.write(1, b"\ninterrupted\n")
        os._exit(128 + number)


def remove(folder):
    """Remove a folder, in which a process that is ending may still write."""
    for _ in range(20):
        if folder is None or not folder.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


class Check:
    """The trials of a check, one after the other until one is not right."""

    def __init__(self, bench, verbose, out, change, rename):
        """change: the number of the one that is tried alone, or None."""
        from workshop.check.trial import STEPS, Mesh

        self.bench, self.verbose, self.out = bench, verbose, out
        self.say, self.change, self.rename = out.say, change, rename
        stage = STAGES[bench.stage]
        self.meshes = [Mesh(*sizes) for sizes in stage.tried or stage.meshes]
        if change:
            self.meshes = [mesh for mesh in self.meshes if mesh.size == 2]
        self.steps, self.warned = STEPS, []
        self.last, self.wrong = "", []  # the last trial, what is wrong in it

    def localise(self):
        """Name the changes without which it would be right, as far as found.

        Scripts with a part of the differences are tried as the last one was.
        """
        from workshop.check import localise, trial

        stage, script = self.bench.stage, self.bench.script
        seen = {}  # differences -> [symptom, answer], or None if right

        def try_out(data):
            # short: the address of a socket in it has 108 characters at most
            folder = self.bench.folder / f"p{len(seen)}"
            folder.mkdir()
            bench = trial.Bench(folder, stage, script, data, Quiet().say)
            bench.place = self.bench.place
            bench.reference = self.bench.reference
            other = Check(bench, False, Quiet(), None,
                          lines_as_in(diff.yours.data, data))
            right = other.repeat(self.last)
            remove(folder)
            return None if right else other.wrong

        try:
            diff = Diff(stage, script)
            renamed = localise.rename(
                script.read_text("utf-8"),
                STAGES[stage].solution.read_text("utf-8")).encode()
        except (UserError, tokenize.TokenError):
            return  # it cannot be compared
        if renamed != diff.yours.data and (
                try_out(renamed) or [""])[0] == self.wrong[0]:
            diff = Diff(stage, script, renamed)
        items = localise.in_order(diff, self.wrong[1])
        if not items or 2 * len(diff.left) > diff.total:
            return  # the finished script, or one that is half made

        seen[frozenset(map(id, items))] = self.wrong

        def symptom(part):
            key = frozenset(map(id, part))
            if key not in seen:
                data = localise.without(diff, part)
                seen[key] = data and try_out(data)
            return seen[key] and seen[key][0]

        for part in localise.find(items, symptom):
            _, answer = seen[frozenset(map(id, part))]
            text = f"It is {localise.name(diff, part)}"
            if answer != self.wrong[1]:
                text += f": {answer}"
            self.say(f"        {text}.")
            self.give_reason(
                next((item for item in part if item.number), None), text)

    def give_reason(self, change, text):
        """Say why the lesson makes a change: the first two sentences.

        change: None where the script differs from the lesson otherwise.
        text: for a notebook, what was found.
        """
        why = change.why.split("\n")[0] if change else ""
        first = " ".join(re.split(r"(?<=[.!?]) ", why)[:2])
        if first:
            self.say(f"        {first}")
        self.out.report(cause=[text, first])

    def trials(self):
        """What is tried, in this order: {column of the table: function}."""
        more = {"uneven": self.try_uneven}
        if not self.change:
            more |= {"resumed": self.try_to_resume,
                     "stopped": self.try_to_stop}
            if STAGES[self.bench.stage].trainer:
                more |= {"bf16": self.try_bf16, "fsdp2": self.try_fsdp2}
        return {label(mesh): partial(self.try_mesh, mesh)
                for mesh in self.meshes} | more

    def repeat(self, last):
        """Try the trial of that name again, and what it needs first."""
        if last == "resumed" and not self.try_mesh(self.meshes[0]):
            return False
        return self.trials()[last]()

    def run(self):
        """Whether all of them are right."""
        bench, trials = self.bench, self.trials()
        self.out.report(columns=[*trials])
        self.say(f"{bench.script.name} against the single-device stage: "
                 f"preset tiny, fp32, {self.steps} steps")
        bench.reference = self.try_reference()
        right = all(try_out() for try_out in trials.values())
        if right and self.change:
            self.say("\nRight, as far as 2 processes show it. Without a "
                     "number, the check tries everything.")
        elif self.change:
            tried = documents.load(bench.stage)[self.change - 1]
            self.give_reason(tried, f"Change {self.change} ({tried.title})")
        elif not right:
            self.localise()
        else:
            self.out.show_table()
            self.say("Right: " + sizes(self.meshes) + " compute what the "
                     "single device computes."
                     + (" Mind the warning." if self.warned else ""))
        if not right:
            self.say("\nNot yet." + ("" if self.verbose else self.out.more))
        self.out.report(right=right)
        return right

    def try_reference(self):
        """The single device's trial, once for all checks of this program."""
        from workshop.check import endings
        from workshop.check.trial import Mesh

        solution = STAGES[FIRST].solution
        if solution in references:
            return references[solution]
        reference = self.bench.try_out(
            "reference", Mesh(), script=solution, plain=True)
        reference.script = solution
        require(len(reference.rows) == self.steps and reference.seen[0],
                "the single-device stage does not run here: "
                f"{endings.last_words(reference, 0)}")
        references[solution] = reference
        return reference

    def try_mesh(self, mesh):
        self.begin(label(mesh), name(mesh))
        folder = f"mesh-{mesh.pp}-{mesh.dp}-{mesh.tp}"
        trial = self.bench.try_out(folder, mesh, plain=mesh.size == 1)
        return self.judge(trial, "whole")

    def try_uneven(self):
        from workshop.check.trial import UNEVEN, Mesh

        mesh = Mesh(dp=2)
        self.begin("uneven", f"{name(mesh)}, a minibatch of {UNEVEN} samples")
        trial = self.bench.try_out("uneven", mesh, "--minibatch-size", UNEVEN)
        return self.judge(trial, "uneven")

    def try_to_resume(self):
        """In another world: a run of the first mesh, on the second."""
        first, *others = self.meshes
        mesh = next((one for one in others if one.size == 2), first)
        import torch

        from workshop.check.trial import RESUMED

        self.begin("resumed", f"{name(mesh)}, resuming after step "
                   f"{RESUMED - 1} a run of {name(first)}")
        self.bench.keep_first_checkpoint(
            f"mesh-{first.pp}-{first.dp}-{first.tp}", "resumed")
        file, = self.bench.folder.glob("resumed/checkpoints/step_*.pt")
        trial = self.bench.try_out("resumed", mesh, "--resume")
        trial.first_step = RESUMED
        trial.resumed = torch.load(file, weights_only=True)
        return self.judge(trial, "resumed")

    def try_to_stop(self):
        mesh = next((one for one in self.meshes if one.size == 2),
                    self.meshes[-1])
        self.begin("stopped", f"{name(mesh)}, stopped early")
        # and with flags that compute the same
        trial = self.bench.try_out(
            "stopped", mesh, "--compile", "--recompute", "--generate-every",
            1, terminated=0)
        return self.judge(trial, "stopped")

    def try_bf16(self):
        self.begin("bf16", "1 process, --precision bf16")
        trial = self.bench.try_out("bf16", self.meshes[0], "--precision",
                                   "bf16", "--strategy", "ddp", plain=True)
        return self.judge(trial, "bf16")

    def try_fsdp2(self):
        mesh = next(mesh for mesh in self.meshes if mesh.size == 2)
        self.begin("fsdp2", f"{name(mesh)}, --strategy fsdp2")
        trial = self.bench.try_out(
            "fsdp2", mesh, "--strategy", "fsdp2", "--compile")
        return self.judge(trial, "fsdp2")

    def begin(self, column, words):
        self.last = column
        self.out.report(trial=column)
        self.say("\n" + words)

    def report(self, findings, first):
        """Report the answers; first: the `Finding` that the others follow."""
        for question, finding in findings:
            verdict = finding.verdict
            if first and finding is not first and verdict != "ok":
                verdict = "and"
            self.out.report(answer=[question.title, verdict])
            if verdict != "ok":
                self.out.report(finding=[verdict, finding.text, finding.hint])

    def judge(self, trial, kind):
        """Tell what came of a trial; whether it is right."""
        from workshop.check.questions import ask

        findings = ask(trial, self.bench.reference, kind)
        for _, finding in findings:
            finding.text = self.rename(finding.text)
            finding.hint = self.rename(finding.hint or "")
        wrong = [one for one in findings if one[1].verdict == "FAIL"]
        self.report(findings, wrong[0][1] if wrong else None)
        if kind == "whole" and all(trial.seen):
            self.out.report(picture=picture(trial, self.bench.reference))
        if wrong:
            question, finding = wrong[0]
            self.wrong = [symptom_of(question, finding), finding.text]
            self.out.show_table()
            self.tell(wrong[0][1])
            rest = [one for one in findings if one is not wrong[0]
                    and one[1].verdict != "ok"]
            if self.verbose:
                for _, finding in rest:
                    self.tell(finding, "and")
            elif rest:
                self.say(f"        ({len(rest)} more follow"
                         f"{'s' if len(rest) == 1 else ''} from it)")
            return False
        for _, finding in findings:
            if finding.verdict == "warn":
                self.tell(finding, seen=finding.text in self.warned)
                self.warned.append(finding.text)
            elif self.verbose:
                self.tell(finding)
        if not self.verbose:
            titles = [question.title for question, finding in findings
                      if finding.verdict == "ok"]
            self.say("  ok    " + (
                "; ".join(titles) if len(titles) < 3 else
                f"{len(titles)} questions, from its data to its checkpoints "
                f"({trial.seconds:.1f} s)"))
        return True

    def tell(self, finding, verdict=None, seen=False):
        self.say(f"  {verdict or finding.verdict:4}  {finding.text}")
        if finding.hint and not seen and finding.verdict != "ok":
            self.say(f"        -> {finding.hint}")


def symptom_of(question, finding):
    """What two scripts have in common that are wrong in the same way."""
    error = re.search(r"\b[A-Z]\w*(Error|Exception)\b.*", finding.text)
    return question.title, error and re.sub(r"\d+", "0", error[0])


def picture(trial, reference):
    """Who read what, and the losses, for a notebook's picture."""
    from workshop.check.findings import number

    def losses(rows):
        values = [number(row, "loss") for row in rows]
        return [value if value == value else None for value in values]

    dp, tp = trial.mesh.dp, trial.mesh.tp
    return {"read": [seen["samples"] for seen in trial.seen],
            "readers": [rank // tp % dp for rank in range(trial.mesh.size)],
            "expected": reference.seen[0]["samples"],
            "loss": losses(trial.rows), "single": losses(reference.rows)}


def label(mesh):
    """The trial's column in the table."""
    if mesh.tp * mesh.pp == 1:
        return str(mesh.size)
    return "x".join(map(str, (mesh.pp, mesh.dp, mesh.tp)))


def name(mesh):
    """What a trial is called."""
    if mesh.size == 1:
        return "1 process (plain python)"
    shape = [f"{count} {word}" for count, word in (
        (mesh.pp, "stages"), (mesh.dp, "data-parallel"),
        (mesh.tp, "tensor-parallel")) if count > 1]
    text = f"{mesh.size} processes"
    if mesh.tp * mesh.pp > 1:
        text += f" ({' x '.join(shape)})"
    return text + (", as on 2 nodes" if mesh.nodes == 2 else "")


def sizes(meshes):
    """What computes the same, in words: the largest mesh with its shape."""
    *others, last = [str(mesh.size) for mesh in meshes]
    mesh, shape = meshes[-1], ""
    if mesh.tp * mesh.pp > 1:
        sides = (mesh.pp, mesh.dp, mesh.tp)[0 if mesh.pp > 1 else 1:]
        shape = f", the {last} as {' x '.join(map(str, sides))},"
    return f"{', '.join(others)} and {last} processes{shape}"


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1]) else 1)
