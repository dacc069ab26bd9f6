"""The state of a check, or of verify: a table and the findings.

It is made of events, in the program itself or in a notebook. Beside those of
`rankcheck.engine.report` a check has

    columns   [name, ...] of the runs, before the first of them
    about     what these names mean, if they do not say it
    run     the name of the run that begins
    answer    [title of the question, verdict] in this run; the verdict is
              "ok", "warn", "FAIL", or "and" for what follows from a FAIL
    cause     [which change it is, why that is made, the lesson's hint or ""]
    picture   {"read": the samples of each step by each rank, "readers": for
              each rank a number, the same where the samples have to be the
              same, "expected": those of each step, "loss": [...], "single":
              [...]}
    table     nothing: all answers are there
    summary   a line in place of findings, where not all are told

Its findings are those that are not ok, unless all are told.
"""

from __future__ import annotations

import html
import json
import os
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rankcheck.engine import report
from rankcheck.engine.findings import LABELS, count_of
from workshop.html import (
    TERMINAL_BLUE,
    TERMINAL_ORANGE,
    folded,
    paragraph,
    quote_text,
    scrolling,
)

VERDICT_MARKS = {"ok": "ok", "warn": "!", "FAIL": "x", "and": "-"}
SIGNS = {"ok": ("yes", "✓"), "warn": ("hm", "!"), "FAIL": ("no", "✗"),
         "and": ("and", "·")}
MEANING = {"ok": "correct", "warn": "warning", "FAIL": "first failure",
           "and": "consequence of that failure"}
NOT_ASKED = "not checked"
COLUMN_MEANINGS = {
    "operations": "each operation alone",
    "uneven": "a minibatch that cannot be shared",
    "resumed": "a resumed run", "stopped": "a run stopped early",
    "bf16": "--precision bf16", "fsdp2": "--strategy fsdp2"}
WORST = ("FAIL", "warn", "and", "ok", "")  # "": what was not seen
FOLDED_ROWS = (("and", "1 further finding follows from this one",
                "{} further findings follow from this one"),
               ("ok", "1 property, correct", "{} properties, all correct"),
               ("", "1 thing was not checked", "{} things were not checked"))
Verdicts = Mapping[str, str]  # of one question: by the run's name


class Board:
    """A check and its progress."""

    def __init__(self, rewrite: Callable[[str], str] = str) -> None:
        """rewrite: a function that rewrites each text for a notebook."""
        self.rewrite = rewrite
        self.columns: list[str] = []
        self.about, self.run = "", ""
        self.answers: dict[str, dict[str, str]] = {}
        self.findings: list[list[str]] = []  # verdict, text, fix
        self.pictures: dict[str, dict[str, Any]] = {}  # of each run
        self.causes: list[list[str]] = []
        self.last = ""
        self.right: bool | None = None
        self.is_old = False  # the script was changed since
        self.last_output = ""  # the last line that is no event

    def read(self, line: str) -> None:
        """Process a line that the check prints, usually an event.

        Libraries print, too; only our own warnings are worth showing. An
        error is the last line, and no event comes after it. If it comes after
        the verdict, that is none, and the error says why.
        """
        try:
            self.update(json.loads(line))
        except (ValueError, AttributeError):
            self.last_output = line.strip() or self.last_output
            if line.startswith("warning: "):
                self.update({"finding": ["warn", self.last_output[9:], ""]})
            if line.startswith("error: ") and self.right is False:
                self.update({"finding": ["warn", self.last_output[7:], ""]})

    def end(self) -> None:
        """Note the end of the output: without a verdict, the check failed."""
        if self.right is None:
            self.update({"say": "The check did not finish."})
            if self.last_output:
                # the label says it
                text = self.last_output.removeprefix("error: ")
                self.update({"finding": ["FAIL", text, ""]})
            self.right = False

    def update(self, event: Mapping[str, Any]) -> None:
        (kind, value), = event.items()
        if kind == "answer":
            self.answers.setdefault(value[0], {})[self.run] = value[1]
        elif kind == "finding":
            if value not in self.findings:
                self.findings.append(value)
        elif kind == "cause":
            self.causes.append(value)
        elif kind == "picture":
            self.pictures[self.run] = value
        elif kind == "say" and value.strip():
            self.last = value.strip()
        elif kind in ("columns", "about", "run", "right"):
            setattr(self, kind, value)

    def to_text(self, colour: bool = False, width: int = 79) -> str:
        """Return the table for a terminal of this width."""
        sizes = [max(3, len(name) + 1) for name in self.columns]
        room = max(20, width - sum(sizes))
        lines = [" " * room + "".join(
            f"{name:>{size}}"
            for name, size in zip(self.columns, sizes, strict=True))]
        for title, verdicts in self.answers.items():
            *above, last = textwrap.wrap(title, room - 1,
                                         break_on_hyphens=False,
                                         break_long_words=False)
            line = f"{last:{room}}"
            for name, size in zip(self.columns, sizes, strict=True):
                mark = VERDICT_MARKS.get(verdicts.get(name, ""), "")
                code = TERMINAL_BLUE if mark == "ok" else TERMINAL_ORANGE
                line += (f"\033[{code}m{mark:>{size}}\033[0m" if colour
                         else f"{mark:>{size}}")
            lines += [*above, line.rstrip()]
        return "\n".join([*textwrap.wrap(self.describe_columns(), width),
                          *textwrap.wrap(legend(VERDICT_MARKS), width), "",
                          *lines])

    def describe_columns(self) -> str:
        """Return what the columns' names mean, in one line."""
        known = [f"{name}: {COLUMN_MEANINGS[name]}" for name in self.columns
                 if name in COLUMN_MEANINGS]
        if any(name.isdecimal() for name in self.columns):
            known.insert(0, "number of processes")
        if not known:
            return self.about
        text = f"Columns: {'; '.join(known)}."
        if self.about:
            text += f" {self.about}"
        return text

    def to_html(self, pictures: str = "") -> str:
        """The verdict, its reasons, the questions that failed, and pictures.

        What follows is folded, and what is right.
        """
        kind = ""
        if self.right is not None:
            kind = "good" if self.right else "bad"
        out = [paragraph("Your script has changed since this check.", "ask")
               ] * self.is_old
        out += [paragraph(f"<strong>{self.quote(self.last)}</strong>", kind)]
        out += self.diagnoses("FAIL", "warn")
        out += [self.cause(*cause) for cause in self.causes]
        rows: dict[str, dict[str, Verdicts]] = {
            verdict: {} for verdict in WORST}
        for title, verdicts in self.answers.items():
            worst = min(verdicts.values(), key=WORST.index)
            rows[worst][title] = verdicts
        if self.columns:
            shown = {**rows["FAIL"], **rows["warn"]}
            if rows["ok"]:
                shown[self.title_of_correct(rows)] = {
                    name: "ok" for verdicts in rows["ok"].values()
                    for name in verdicts}
            signs = {kind: sign for kind, (_, sign) in SIGNS.items()}
            out += [self.table(shown), paragraph(" ".join(filter(
                None, (self.describe_columns(), legend(signs)))), "legend")]
        out = [f'<div class="beside"><div>{"".join(out)}</div>{pictures}'
               "</div>"]
        for verdict, one, more in FOLDED_ROWS:
            diagnoses = self.diagnoses(verdict)
            count = len(diagnoses or rows[verdict])
            if count:
                out.append(folded(
                    one if count == 1 else more.format(count),
                    "".join(diagnoses)
                    + (self.table(rows[verdict]) if rows[verdict] else "")))
        return "".join(out)

    def title_of_correct(self, rows: Mapping[str, Mapping[str, Verdicts]]
                         ) -> str:
        """Return the title of the row for all questions that are correct.

        rows: the questions, by their worst verdict. Those that follow from a
        failure are folded below the table, so they are not among `all other`.
        """
        if rows["and"]:
            return count_of(len(rows["ok"]), "other question")
        if rows["FAIL"] or rows["warn"]:
            return "all other questions"
        return "all questions"

    def cause(self, text: str, why: str, hint: str) -> str:
        """Return HTML for the wrong change: a hint before the rest."""
        text, why, hint = map(self.quote, (text, why, hint))
        if not hint:
            return paragraph(f"{text}. {why}", "ask")
        return (paragraph(f"{text}. {hint}", "ask")
                + folded("Tell me more", paragraph(why)))

    def diagnoses(self, *verdicts: str) -> list[str]:
        """HTML of the findings with these verdicts, a list."""
        return [self.diagnosis(*finding) for finding in self.findings
                if finding[0] in verdicts]

    def diagnosis(self, verdict: str, text: str, fix: str) -> str:
        """HTML of one finding."""
        label = LABELS.get(verdict, verdict)
        kind = "ask"
        if verdict == "FAIL":
            kind = "bad"
        shown = paragraph(f"<strong>{label}</strong> {self.quote(text)}", kind)
        if fix:
            shown += paragraph(f"fix: {self.quote(fix)}", "hint")
        return shown

    def table(self, rows: Mapping[str, Verdicts]) -> str:
        """HTML of {question: {run: verdict}}."""
        running = self.run if self.right is None else None
        head = "".join(
            f'<th scope="col">{html.escape(name)}'
            f'{"…" if name == running else ""}</th>'
            for name in self.columns)
        lines = "".join(
            f'<tr><th scope="row">{html.escape(title)}</th>'
            f'{"".join(self.cell(verdicts, name) for name in self.columns)}'
            "</tr>" for title, verdicts in rows.items())
        about = "Which question is answered, and how, in which run"
        return scrolling(
            f'<table class="check"><caption>{about}</caption>'
            f"<tr><td></td>{head}</tr>{lines}</table>", about)

    def cell(self, verdicts: Verdicts, name: str) -> str:
        verdict = verdicts.get(name, "")
        kind, sign = SIGNS.get(verdict, ("", ""))
        about = MEANING.get(verdict, NOT_ASKED)
        return (f'<td class="{kind}" title="{about}"><span aria-hidden="true">'
                f'{sign}</span><span class="unseen">{about}</span></td>')

    def quote(self, text: str) -> str:
        return quote_text(self.rewrite(text))


def legend(signs: Mapping[str, str]) -> str:
    """Return the signs' meanings in one line. signs: {verdict: sign}."""
    known = "; ".join(f"{sign} = {MEANING[verdict]}"
                      for verdict, sign in signs.items())
    return f"{known}; blank = {NOT_ASKED}."


class CheckTerminal(report.Terminal):
    """Prints what is said and found, and the table where that is asked for.

    verbose: whether what is right is printed, or follows from a FAIL.
    """

    def __init__(self, verbose: bool) -> None:
        super().__init__()
        self.board, self.verbose = Board(), verbose

    def report(self, **event: Any) -> None:
        self.board.update(event)
        super().report(**event)
        if "table" in event:
            colour = self.tty and "NO_COLOR" not in os.environ
            print(f"\n{self.board.to_text(colour, self.width)}\n", flush=True)
        elif "summary" in event and not self.verbose:
            self.say(event["summary"])

    def tell(self, verdict: str, text: str, fix: str) -> None:
        if self.verbose or verdict in ("FAIL", "warn"):
            super().tell(verdict, text, fix)
