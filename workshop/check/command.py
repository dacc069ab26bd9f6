"""The check: trials on each mesh of a stage, and one diagnosis."""

import argparse
import re
import tokenize
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

from backstage.errors import UserError, require
from backstage.files import show_path
from rankcheck.engine import fork_server, sandbox
from rankcheck.engine.findings import Line
from rankcheck.engine.report import Events, Quiet
from rankcheck.engine.scratch import remove, require_python, scratch_folder
from workshop.board import Terminal
from workshop.check import localise
from workshop.diff import backups, checked, documents
from workshop.diff.diff import Diff, Script
from workshop.diff.render import advice, saved
from workshop.instructor import classroom
from workshop.jobs.mpirun import require_mpirun
from workshop.jobs.originals import require_originals
from workshop.stages import DESK, FIRST, LESSONS, STAGES, modules_of

references = {}  # script -> Trial


def number_or_next(text):
    if text != "next" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number, nor next")
    return text if text == "next" else int(text)


def add_arguments(parser):
    parser.add_argument("stage", choices=LESSONS,
                        help="the stage that the lesson makes")
    parser.add_argument("change", nargs="?", metavar="number",
                        type=number_or_next, help="check only this change, "
                        "as diff numbers it, with all others made; next: the "
                        "first change that is left")
    parser.add_argument("-v", "--verbose", action="store_true",
                        help="show every question, and the effects of a "
                        "mistake")
    parser.add_argument("--events", action="store_true",
                        help=argparse.SUPPRESS)  # for a notebook


def main(args):
    require_originals()
    return int(not check(args.stage, verbose=args.verbose, events=args.events,
                         change=args.change))


def check(stage, script=DESK, verbose=False, events=False, change=None):
    """Check a script; returns whether it is right. Prints as it goes.

    verbose: with every question, and what follows from a mistake. events:
    in JSON, for a `Board` elsewhere. change: the number of a change of the
    lesson, to try it alone, as it is in the script: quickly, on two processes,
    and with all the others made.
    """
    if STAGES[stage].launcher == "mpirun":
        require_mpirun()
    yours = data = backups.read_script(script)
    try:
        broken = Script(script, data).syntax_error
    except UserError:  # `require_python` says what it is
        broken = ""
    require(not broken, f"{show_path(script)} is not Python yet, {broken}")
    out, files = Events() if events else Terminal(verbose), sandbox.Kept()
    place = ""
    with scratch_folder(out.interrupted) as folder:
        require_python(script, data)
        if change is not None:
            diff = Diff(stage, script, yours)
            change, data = make_others(diff, change, out.say)
            if data is None:
                out.report(right=True)
                return True
            place = find_place(diff, change)
        # it imports torch while this process does
        fork_server.get_servers(modules_of(stage))
        from workshop.check import plan as trial

        files.changed()  # by others, while torch was imported
        bench = trial.Bench(folder, stage, script, data, out.say)
        trials = Check(bench, out, change, lines_as_in(yours, data), place)
        right = trials.run()
        # else it was another program, such as a notebook or a run
        if bench.copy.noted("started") and (changed := files.changed()):
            out.say(f"warning: {changed}, {sandbox.BY_WHOM}")
    if right and change is None:
        checked.record(stage, data)
    elif right and not trials.warned:  # else it would count as made
        checked.record(f"{stage} {change}", data)
    if change is None:
        title = trials.wrong.title if trials.wrong else ""
        classroom.note(stage, right=right, mistake=title)
    return right


def make_others(diff, change, say):
    """Its number, and the script with all others made as in the lesson.

    change: "next" is the first that is left. In place of the script there is
    None if this one is made so, too.
    """
    if change == "next":
        require(diff.left, "no change is left: `python -m workshop check "
                f"{diff.stage}` checks them all")
        change = diff.left[0].number
    diff.require_change(change)
    require(not diff.other_stage(), advice(diff))
    items = [item for item in diff.left if item.number == change]
    if not items:
        say(f"Change {change} is made as in the lesson.")
        return change, None
    say(f"Change {change} ({items[0].title}) as it is in your script, "
        "with all others made:")
    data = localise.without(diff, items, diff.left)
    require(data, "your edits conflict with the other changes: `python -m "
            f"workshop diff {diff.stage}` shows them")
    return change, data


def name_sizes(sizes: list[int]) -> str:
    """Return "1 process", or "1, 2 and 4 processes"."""
    if sizes == [1]:
        return "1 process"
    *others, last = map(str, sizes)
    if not others:
        return f"{last} processes"
    return f"{', '.join(others)} and {last} processes"


def find_place(diff: Diff, number: int) -> str:
    """Return ", line N" of a change: where it is one's own, or begins."""
    for item in diff.left:
        if item.number == number:
            own = diff.own_lines({number})
            line = own[0] if own else item.edits[0][0]
            return f", line {line + 1}"
    return ""


def lines_as_in(yours, tried):
    """A function that names a `Line` of the script that was tried.

    It names it as a line of the attendee's script, or quotes it if it is not
    there.
    """
    if tried == yours:  # comparing it with itself may take long
        return str
    yours, tried = (data.decode("utf-8", "replace").splitlines()
                    for data in (yours, tried))
    same = {a + k + 1: b + k + 1 for a, b, size in SequenceMatcher(
        None, tried, yours, autojunk=False).get_matching_blocks()
            for k in range(size)}

    def name(line):
        if line in same or not 0 < line <= len(tried):
            return f"line {same.get(line, int(line))}"
        return f"the lesson's line `{tried[line - 1].strip()}`"

    return name


def name_lines(finding, name):
    """Put the text that `name` has for it in the place of each line."""
    for words in (finding.sentence, finding.hint):
        words[:] = [name(part) if isinstance(part, Line) else part
                    for part in words]


@dataclass
class Mistake:
    """The first thing that is wrong in a trial."""

    title: str  # of the question
    text: str  # what the attendee reads
    lines: set  # that it names, of the script that was tried
    error: str  # with which that ended, without the numbers in it


class Check:
    """The trials of a check, one after the other until one is not right."""

    def __init__(self, bench, out, change, name, place=""):
        """change: the number of the one that is tried alone, or None.

        name: what a `Line` is called, as from `lines_as_in`. place: of the
        change in the attendee's script.
        """
        self.bench, self.out, self.place = bench, out, place
        self.say, self.change, self.name = out.say, change, name
        self.plan = {row.column: row for row in bench.plan(bool(change))}
        self.last, self.wrong = "", None  # the last trial, its `Mistake`
        self.warned, self.verbose = False, getattr(out, "verbose", False)

    def run(self):
        """Whether all of them are right."""
        from workshop.check.plan import STEPS

        bench = self.bench
        self.out.report(columns=[*self.plan])
        for mesh in [name for name in self.plan if "x" in name[1:2]][:1]:
            self.out.report(
                about=f"{mesh}: pipeline x data x tensor parallel.")
        self.say(f"{bench.script.name}, last {saved(bench.script)}, against "
                 f"the single-device stage: preset tiny, fp32, {STEPS} steps")
        bench.reference = find_reference(bench)
        right = all(map(self.try_out, self.plan))
        # two meshes may have the same size
        sizes = list(dict.fromkeys(
            row.mesh.size for row in self.plan.values()
            if row.kind == "whole"))
        if right and self.change:
            self.say(f"\nCorrect on {name_sizes(sizes[-1:])}. Without a "
                     "number, the check covers everything.")
        elif self.change:
            tried = documents.load(bench.stage)[self.change - 1]
            text = f"Change {self.change} ({tried.title}){self.place}"
            if self.place:
                self.say(f"        It is change {self.change}{self.place}.")
            self.give_reason(tried, text)
        elif not right:
            self.localise()
        else:
            self.out.report(table=None)
            verdict = (f"Correct on {name_sizes(sizes)}: the same "
                       "training as on one device.")
            if self.warned:
                verdict += " See the warning above."
            self.say(verdict)
        if not right:
            verdict = "\nNot yet."
            if isinstance(self.out, Terminal) and not self.verbose:
                verdict += " Use -v for details."
            self.say(verdict)
        self.out.report(right=right)
        return right

    def try_out(self, column):
        """Make a trial and report it; return whether it is right."""
        from workshop.check.questions import ask

        row, self.last = self.plan[column], column
        self.out.report(trial=column)
        self.say(f"\n{row.mesh.words}{row.about}")
        trial = self.bench.make(row)
        findings = ask(trial, self.bench.reference, row.kind)
        first = next((one for one in findings if one[1].verdict == "FAIL"),
                     None)
        named = first and first[1].lines
        for question, finding in findings:
            name_lines(finding, self.name)
            if first and finding is not first[1] and finding.verdict != "ok":
                finding.verdict = "and"
            self.out.report(answer=[question.title, finding.verdict])
        if row.kind == "whole" and all(trial.seen):
            self.out.report(picture=picture(trial, self.bench.reference))
        if first:
            self.wrong = Mistake(first[0].title, first[1].text, named,
                                 re.sub(r"\d+", "0", first[1].error))
            self.out.report(table=None)
        self.tell([finding for _, finding in findings], trial.seconds)
        return not first

    def tell(self, findings, seconds):
        """The answers, and how many of them a terminal leaves out."""
        for finding in findings:
            if finding.verdict != "ok" or self.verbose:
                self.out.report(finding=[
                    finding.verdict, finding.text, finding.advice])
        count = Counter(finding.verdict for finding in findings)
        self.warned |= count["warn"] > 0
        if count["FAIL"] and count["and"]:
            self.out.report(summary=f"        ({count['and']} more follow"
                            f"{'s' * (count['and'] == 1)} from it)")
        elif not count["FAIL"]:
            self.out.report(summary="  ok    " + (
                findings[0].text if len(findings) == 1 else
                f"{count['ok']} questions ({seconds:.1f} s)"))

    def localise(self):
        """Name the changes without which it would be right, as far as found.

        Scripts with a part of the differences are tried as the last one was.
        """
        stage, script = self.bench.stage, self.bench.script
        try:
            mine = Diff(stage, script)
            diff = Diff(stage, script, localise.rename(
                script.read_text("utf-8-sig"),  # there may be a mark
                STAGES[stage].solution.read_text("utf-8")).encode())
        except (UnicodeDecodeError, UserError, tokenize.TokenError):
            return  # it cannot be compared
        if 2 * len(diff.left) > diff.total or mine.other_stage():
            left = f"{len(diff.left)} of {diff.total} changes are left"
            self.say(f"        {left}. {advice(mine)}")
            self.out.report(cause=[left, advice(mine)])
            return
        items = localise.in_order(diff, self.wrong.lines)
        # differences -> a `Mistake`, or None if right
        seen = {frozenset(map(id, items)): self.wrong}

        def symptom(part):
            key = frozenset(map(id, part))
            if key not in seen:
                data = localise.without(diff, part)
                seen[key] = data and self.try_part(data, diff.yours.data)
            mistake = seen[key]
            # two scripts that are wrong in the same way have these in common
            return mistake and (mistake.title, mistake.error)

        for part in localise.find(items, symptom):
            answer = seen[frozenset(map(id, part))].text
            text = f"It is {localise.name(part)}"
            if answer != self.wrong.text:
                text += f": {answer}"
            self.say(f"        {text}.")
            self.give_reason(
                next((item for item in part if item.number), None), text,
                localise.kept_lines(diff, part))

    def try_part(self, data, yours):
        """The `Mistake` in the last trial of this script, None if right."""
        bench = self.bench.with_script(data)
        other = Check(bench, Quiet(), None, lines_as_in(yours, data))
        right = (self.last != "resumed" or other.try_out("1")  # its run
                 ) and other.try_out(self.last)
        remove(bench.folder)
        return None if right else other.wrong

    def give_reason(self, change, text, kept=""):
        """Say why the lesson makes a change: the first two sentences.

        change: None where the script differs from the lesson otherwise.
        text: for a notebook, what was found. kept: the line that the lesson
        keeps, where that is broken: the change's reason is another.
        """
        why = change.why.split("\n")[0] if change else ""
        first = " ".join(re.split(r"(?<=[.!?]) ", why)[:2])
        if kept:
            first = f"The lesson keeps this line: `{kept}`."
        if first:
            self.say(f"        {first}")
        self.out.report(cause=[text, first])


def find_reference(bench):
    """The single device's trial, once for all checks of this program."""
    from rankcheck.engine import exits
    from workshop.check.plan import STEPS, Mesh, Row

    solution = STAGES[FIRST].solution
    if solution not in references:
        one = bench.with_script(solution.read_bytes(), FIRST).try_out(
            Row("1", "whole", Mesh()))
        require(len(one.rows) == STEPS and one.seen[0], "the single-device "
                "stage does not run here: it "
                + exits.last_words(one, 0).text)
        references[solution] = one
    return references[solution]


def picture(trial, reference):
    """Who read what, and the losses, for a notebook's picture."""
    from workshop.check.questions.question import number

    def losses(rows):
        values = [number(row, "loss") for row in rows]
        return [value if value == value else None for value in values]

    dp, tp = trial.mesh.dp, trial.mesh.tp
    return {"read": [seen["samples"] for seen in trial.seen],
            "readers": [rank // tp % dp for rank in range(trial.mesh.size)],
            "expected": reference.seen[0]["samples"],
            "loss": losses(trial.rows), "single": losses(reference.rows)}
