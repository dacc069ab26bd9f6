"""The decks' text: Markdown, written from source/ and from the course itself.

A source is a Jinja template: `{{ ... }}` asks for a number, a list of changes
or a diff. So what stands on a slide is computed, or is a lesson's own text.
"""

import ast
import json
import math
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass, replace
from difflib import unified_diff
from functools import cache, partial
from itertools import pairwise

import jinja2

from backstage import ROOT
from backstage.errors import require
from backstage.flops import PEAKS, flops_per_token, num_parameters
from notebooks.experiments import sharding
from slides import figures, schedules
from workshop.diff import render
from workshop.diff.diff import Diff, line_differences, load_lesson
from workshop.instructor.plan import LENGTHS, MORE, read_plan
from workshop.results import arithmetic, limit, runs
from workshop.stages import FIRST_STAGE, LESSONS, STAGES

SLIDES = ROOT / "slides"
SHARDS, SHARD = 98, 100_000_000  # the course's dataset; tokens in a shard
ASSUMED = {  # what an example calculates with
    "share": arithmetic.SHARE_OF_PEAK,  # which a good script reaches
    "link": arithmetic.LINK,  # bytes/s, between nodes, or CPU and GPU
    "memory": 80e9,  # of a GPU
    "B": 16,  # samples in a microbatch
    "gpus": 8, "larger": 7e9,  # parameters of a model that does not fit
    "stages": 4, "microbatches": 8,  # of a pipeline
}
DECKS = {  # a deck's name: its title
    "course": "The course in {} minutes",
    "training-at-scale": "Training at scale",
    "practical-mpi": "Practical MPI",
    "the-ladder": "The ladder: one model, four versions",
    "pages-to-keep": "Pages to keep",
}


def read_source(name):
    """A deck's template, with the parts that it includes."""
    text = (SLIDES / "source" / f"{name}.md").read_text("utf-8")
    return re.sub(r'{% include "(.+)\.md" %}',
                  lambda found: read_source(found[1]), text)


# ----------------------------------------------------------------- the clock


class Clock:
    """Says at which minute a slide is due.

    A section lasts as long as the plan says. Its slide with "rest", or its
    last one, gets what the others leave.
    """

    def __init__(self, deck, minutes):
        self.deck, self.plan = deck, read_plan()
        self.length = minutes if deck == "course" else MORE
        self.sections = []  # (name in the plan, minutes, its slides' minutes)

    def has(self, name):
        """Whether the plan gives a section minutes in this deck."""
        return name in self.plan and self.length in self.plan[name].minutes

    def section(self, name):
        """Begin a section of the plan."""
        row = self.plan[name]
        return self.begin(name, row.minutes[self.length], row.what)

    def talk(self, minutes, what):
        """Begin a section that is in this deck alone."""
        return self.begin("", minutes, what)

    def begin(self, where, minutes, what):
        """The directive by which Marp writes a section's name at the top."""
        self.sections.append((where, minutes, []))
        return f"<!-- header: {json.dumps(what)} -->"

    def parts(self):
        """The deck's sections: [(minutes, what, whether it is a lesson)]."""
        source = read_source(self.deck)
        return [(self.plan[name].minutes[self.length], self.plan[name].what,
                 True) if name else (int(minutes), what, False)
                for name, minutes, what in re.findall(
                    r'clock\.(?:section\("(.+?)"|talk\((\d+), "(.+?)")\)',
                    source)]

    def __call__(self, minutes):
        """Where a slide's notes say its time; minutes: a number or "rest"."""
        self.sections[-1][2].append(minutes)
        return "\0"

    def finish(self, text):
        """The deck, in which the notes say from when to when."""
        lines, now = [], 0
        for where, minutes, slides in self.sections:
            what = f"{self.deck}: {where or 'the talk'}"
            fixed = sum(slide for slide in slides if slide != "rest")
            if "rest" not in slides:
                slides[-1] += minutes - fixed
            require(fixed < minutes + ("rest" not in slides), f"{what} has "
                    f"{minutes} minutes, its slides {fixed}")
            path = where and self.plan[where].where
            place = (f" `{path}`," * bool(path)) + (
                f" section: {where}." * bool(where))
            for slide in slides:
                begin = now
                now += minutes - fixed if slide == "rest" else slide
                lines.append(f"Minutes {begin:g} to {now:g}.{place}")
        return re.sub("\0", lambda _: lines.pop(0), text)


# ------------------------------------------------------------------- facts


@cache
def facts():
    """The numbers on the slides, computed from the course's own code."""
    std = sharding.std
    hp, config = std.PRESETS["gpt2"], std.MODELS["gpt2"]
    T, S = hp.sequence_length, hp.minibatch_size
    steps = (SHARDS * SHARD - 1) // T // S
    small, large = (num_parameters(model) for model in (
        arithmetic.GPT2, arithmetic.XL))
    flop = flops_per_token(config, T)
    waiting = schedules.idle(schedules.events(
        schedules.GPIPE, ASSUMED["stages"], ASSUMED["microbatches"]))
    rows = {path.name: runs.read_run(path)
            for path in sorted(runs.EXAMPLES.glob("*-[0-9]"))}
    _, *limits = limit.scaling_limits(rows["std-1"])
    ladder = runs.read_ladder(example=True)
    record = json.loads((runs.EXAMPLES / "first_gpu.json").read_text())
    gpu = {name: record["items"][name]["found"][name]
           for name in ("std", "std, eager")}
    return {
        **ASSUMED, "T": T, "S": S, "steps": steps, "shards": SHARDS,
        "accumulation": S // ASSUMED["B"], "tokens": steps * S * T,
        "minibatch_tokens": S * T, "last": read_last_step(),
        "small": small, "large": large, "state": arithmetic.state,
        "kinds": arithmetic.STATE, "accumulating": arithmetic.ACCUMULATING,
        "GPT2": arithmetic.GPT2, "XL": arithmetic.XL,
        "activations": arithmetic.activations,
        "decisions": arithmetic.averaging_rules(ASSUMED["memory"]),
        "flop": flop,
        "gradients": 4 * small, "traffic": arithmetic.ring,
        "peak": PEAKS["A100"][0] * 1e12, "runs": rows,
        "karpathy": figures.KARPATHY,
        "h200_peak": PEAKS["H200"][0] * 1e12, "h200": gpu["std"], "gpu": gpu,
        "adamw": std.GPT(std.MODELS["tiny"]).configure_optimizers(
            std.PRESETS["tiny"]).defaults, "decay": hp.weight_decay,
        "efficiency": runs.efficiency(rows.values()),
        **runs.read_given(),
        "efficiency_of": runs.published_efficiency, "waiting": waiting,
        "lost": runs.lost_seconds, "limits": limits,
        "ladder": ladder,
        "measured": [rung for rung in ladder["rungs"]
                     if "interpreted" not in rung["name"]],
        "ring": figures.RING,
        "critical": arithmetic.critical_tokens, "bills": arithmetic.cost_rows,
        "messages": lambda **changes: len([*std.GPT(replace(
            std.MODELS["nano"], **changes)).parameters()]),
        "unread": lambda ranks: (1 - 1 / ranks) ** ranks,
        "shard": SHARD, "ln": math.log,
        "spread": lambda names: max(
            abs(row["loss"] / one["loss"] - 1) for name in names
            for row, one in zip(rows[name].rows, rows["std-1"].rows,
                                strict=True)),
    }


CITATION = re.compile(  # "Li et al. (2020)", "(Li et al., 2020)"
    r"\b([A-Z][\w-]+)(?:'s|\s+et\s+al\.|\s+&\s+[A-Z]\w+|\s+Forum)?"
    r"(?:,\s+|\s+\()((?:19|20)\d\d)\b")


def cited(text):
    """Whom a text cites: {(first author, year)}, in the text's order."""
    return dict.fromkeys(found.groups() for found in CITATION.finditer(text))


def read_references():
    """{(first author, year): reference} of docs/references.md, as sorted."""
    text = (ROOT / "docs" / "references.md").read_text("utf-8")
    return {next(iter(cited(line))): line.removeprefix("- ")
            for line in text.splitlines() if line.startswith("- ")}


def references(source, page=1, pages=1):
    """The references that a deck's source cites: this page of the list."""
    known, names = read_references(), cited(read_source(source))
    unknown = [" ".join(name) for name in names if name not in known]
    require(not unknown, f"slides/source/{source}.md: docs/references.md does "
            f"not have {', '.join(unknown)}")
    found = [line for name, line in known.items() if name in names]
    size = -(-len(found) // pages)
    return "\n".join(f"- {line}" for line in
                     found[(page - 1) * size:page * size])


# -------------------------------------------- what comes from lessons, files


def count(stage):
    """How many changes a lesson has."""
    return len(load_lesson(stage).changes)


def changes(stage, *groups):
    """A table of a lesson's changes, in groups.

    groups: (what they are about, part of the title of the first of them).
    """
    titles = [change.title for change in load_lesson(stage).changes]
    begins = [number(stage, part) for _, part in groups]
    require(begins[0] == 1, f"lesson {stage}: change 1 is in no group")
    rows = ["| about | changes |", "|---|---|"]
    for (name, _), begin, end in zip(
            groups, begins, [*begins[1:], len(titles) + 1], strict=True):
        rows.append(f"| **{name}** | " + "<br>".join(
            f"{k}. {titles[k - 1]}" for k in range(begin, end)) + " |")
    return "\n".join(rows)


def number(stage, part):
    """The number of the change whose title has this part."""
    found = [k for k, change in enumerate(load_lesson(stage).changes, 1)
             if part == change.title] or [
        k for k, change in enumerate(load_lesson(stage).changes, 1)
        if part in change.title]
    require(len(found) == 1, f"lesson {stage}: {part!r} is in the titles "
            f"of {len(found)} changes, not of one")
    return found[0]


def find(stage, part):
    """The change whose title has this part."""
    return load_lesson(stage).changes[number(stage, part) - 1]


def title(stage, part):
    """A change's number and title."""
    return f"{number(stage, part)}. {find(stage, part).title}"


def predict(stage, part):
    """The question to answer before a change is made."""
    question = find(stage, part).predict
    require(question, f"lesson {stage}: {part!r} asks nothing")
    return question


def answer(stage, part):
    """The answer to that question."""
    return find(stage, part).answer


def diff(stage, part):
    """The change whose title has this part, as a block of a diff."""
    return diff_of(stage, number(stage, part))


def diff_of(stage, chosen):
    """Return a change as a block of a diff; each part says where it is.

    chosen: the change's number, from 1.
    """
    lesson, out = load_lesson(stage), []
    for piece in lesson.pieces:
        if piece.change != chosen - 1:
            continue
        old, new = ([script.lines[k] for k in script.where[begin:end]]
                    for script, begin, end in (
            (lesson.start, piece.i1, piece.i2),
            (lesson.goal, piece.j1, piece.j2)))
        rows, i = [], 0
        for i1, i2, j1, j2 in [*line_differences(old, new),
                               (len(old), len(old), 0, 0)]:
            rows += [(" ", line) for line in old[i:i1]]
            rows += [("-", line) for line in old[i1:i2]]
            rows += [("+", line) for line in new[j1:j2]]
            i = i2
        script, k = ((lesson.goal, piece.j1) if new
                     else (lesson.start, piece.i1))
        line = script.where[k]
        place = ", ".join(filter(None, (f"line {line + 1}",
                                        script.place(line))))
        body = textwrap.dedent("\n".join(row for _, row in rows))
        out += [f"@@ {place} @@", *(
            f"{sign}{row}" for (sign, _), row in
            zip(rows, body.splitlines(), strict=True))]
    return "\n".join(["```diff", *out, "```"])


def changed_lines(stage):
    """(removed, added) lines of code, from the stage before."""
    lesson = load_lesson(stage)
    changed = line_differences(lesson.start.code, lesson.goal.code)
    return (sum(i2 - i1 for i1, i2, _, _ in changed),
            sum(j2 - j1 for *_, j1, j2 in changed))


def stage_table():
    """The stages: what each adds, and how many lines of code change."""
    rows = [f"| {FIRST_STAGE} | | {STAGES[FIRST_STAGE].title} | |"]
    for name in LESSONS:
        removed, added = changed_lines(name)
        rows.append(f"| {name} | {STAGES[name].after} | "
                    f"{STAGES[name].title} | -{removed} +{added} |")
    return "\n".join(["| stage | after | what it is | lines |",
                      "|---|---|---|---:|", *rows])


def read_last_step():
    """(steps, validation loss, bits per byte) of the run in the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    steps, loss, bits = re.findall(
        r"^\| step +\d+/(\d+) .*val: ([\d.]+) .*bits/byte: ([\d.]+)", text,
        re.M)[-1]
    return int(steps), float(loss), float(bits)


def from_readme(heading, folder="."):
    """A README's table with this heading; its links become names.

    folder: or the lesson, as "start_here.ipynb".
    """
    text = ("\n\n".join(cells(folder.removesuffix(".ipynb")))
            if folder.endswith(".ipynb") else
            (ROOT / folder / "README.md").read_text("utf-8"))
    found = re.search(rf"^\| {heading} \|.*\n(\|.*(?:\n|$))+", text, re.M)
    return re.sub(r"\[(\w+)\]\([^)]+\)", r"`\1`", found[0].strip())


def hunk(stage, wanted):
    """The part with this text of what `diff -U1` says of a lesson."""
    old, new = (STAGES[name].solution.read_text("utf-8").splitlines()
                for name in (STAGES[stage].after, stage))
    text = "\n".join(unified_diff(old, new, n=1, lineterm=""))
    return next("@@" + part.rstrip() for part in text.split("\n@@")
                if wanted in part)


def find_lines(path, begin, end):
    """(number, lines) from the one that starts with begin, before end."""
    lines = (ROOT / path).read_text("utf-8").splitlines()
    first = next(i for i, row in enumerate(lines) if row.startswith(begin))
    last = next((i for i in range(first + 1, len(lines))
                 if end and lines[i].startswith(end)), len(lines))
    return first + 1, lines[first:last]


def excerpt(path, begin, end):
    """Lines of a file, as `find_lines` finds them, below where they stand."""
    number, lines = find_lines(path, begin, end)
    mark = "//" if path.endswith(".cu") else "#"
    return (f"{mark} {path}, line {number}\n"
            + textwrap.dedent("\n".join(lines)).rstrip())


def printed(name, begin="", end=""):
    """Lines of what a tool printed once, as example-logs/README.md says."""
    return wrap(find_lines(f"example-logs/{name}.txt", begin, end)[1])


def wrap(lines):
    """What was printed, as wide as a slide, without this machine's times."""
    return "\n".join(textwrap.fill(
        re.sub(r"[\d.]+ (ms|GB/s)\b", r"... \1", re.sub(
            r"\| dt:.*", "| ...", line)), 84, replace_whitespace=False,
        subsequent_indent="    ", break_on_hyphens=False)
        for line in lines).rstrip()


def done(stage):
    """What `workshop diff` says when all changes are made."""
    made = Diff(stage, data=STAGES[stage].solution.read_bytes())
    return render.to_text(made).splitlines()[0]


def cells(lesson):
    """The cells of a lesson: their text."""
    book = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text())
    return ["".join(cell["source"]) for cell in book["cells"]]


def cell(lesson, begin, end):
    """Lines of a lesson's cell, from these words to those, below its name.

    end: "" is the end of the cell.
    """
    found = next(cell for cell in cells(lesson) if begin in cell)
    first = found.rfind("\n", 0, found.index(begin)) + 1
    last = found.index(end, first) if end else len(found)
    lines = textwrap.dedent(found[first:last])
    return f"# notebooks/{lesson}.ipynb\n{lines.rstrip()}"


def kept(lesson, begin):
    """What a section of a lesson says from these words on: its points.

    Or its first paragraph, if it has none. Without the questions that end a
    point: a page to keep has no answers to them.
    """
    _, _, text = "\n\n".join(cells(lesson)).partition(begin)
    if begin.startswith("#"):
        text = text.partition("\n")[2].strip()
    else:
        text = begin + text
    text = re.split(r"\n## |<details|To start|\*\*(?:Go on|Next|What it did)",
                    text)[0]
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"\s+\*\*Predict\b(?:.|\n(?!\n|- |\d+\. ))*", "", text)
    points = re.findall(r"^(?:- |\d+\. \[ \] )?(\*\*.+(?:\n(?!\n|- ).+)*"
                        r"|(?<=\] ).+(?:\n {3,}.+)*)", text, re.M)
    return "\n".join(f"- {' '.join(point.split())}" for point in points) or (
        text.split("\n\n")[0].strip())


def key_lines(stage, *parts):
    """The lines of a stage's script with these parts, with their numbers.

    A `UserError` if it is not one, or if it is in the stage before, too.
    """
    before, rows = (STAGES[name].solution.read_text("utf-8") if name else ""
                    for name in (STAGES[stage].after, stage))
    out = []
    for part in parts:
        found = [f"{number:>3}  {row.strip()}" for number, row in
                 enumerate(rows.splitlines(), 1)
                 if part in row and row not in before]
        require(len(found) == 1, f"{stage}: {part!r} is in {len(found)} lines")
        out += found
    return "\n".join(out)


def mistakes(lesson, count):
    """The first diffs of a lesson's "Break it", as a block of a diff."""
    _, _, text = "\n".join(cells(lesson)).partition("## Break it")
    found = re.findall(r"In `(.+?)`[^`]*```diff\n(.*?)```", text, re.S)
    return "\n".join(["```diff", *(
        f"@@ {number}. {place} @@\n{rows.rstrip()}" for number, (place, rows)
        in enumerate(found[:count], 1)), "```"])


@dataclass(frozen=True)
class Exercise:
    """A question of a lesson whose answer is folded."""

    diff: str  # what it changes, as a block of a diff; "" if nothing
    answer: str  # Markdown


def exercise(lesson: str, begin: str) -> Exercise:
    """Return the first exercise of a lesson after this text."""
    _, found, text = "\n\n".join(cells(lesson)).partition(begin)
    require(found, f"lesson {lesson}: there is no {begin!r}")
    before, found, text = text.partition("<details><summary>Answer</summary>")
    require(found, f"lesson {lesson}: no answer after {begin!r}")
    answer = text.partition("</details>")[0].strip()
    block = re.search(r"```diff\n.*?```", before, re.S)
    diff = block[0] if block else ""
    return Exercise(diff, answer)


def constants(path):
    """{name: value} of a script's constants, and of flags that it passes on.
    """
    found, tree = {}, ast.parse((ROOT / path).read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign):
            try:
                values = ast.literal_eval(node.value)
            except ValueError:  # it is computed
                continue
            names = ast.unparse(node.targets[0]).strip("()").split(", ")
            found |= dict(zip(names, values if len(names) > 1 else [values],
                              strict=True))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= {flag.value: value.value for flag, value in
                      pairwise(node.args) if isinstance(flag, ast.Constant)
                      and isinstance(value, ast.Constant)}
    return found


def log(run, *begins):
    """Lines of an example run's log, as much of them as fits on a slide.

    begins: how each of them begins.
    """
    lines = (runs.EXAMPLES / run / "log.txt").read_text("utf-8").splitlines()
    return wrap(next(line for line in lines if line.startswith(begin))
                for begin in begins)


def command(run):
    """The command that made an example run, as example-logs/README.md says."""
    text = (runs.EXAMPLES / "README.md").read_text("utf-8")
    found = re.search(rf"^\| `{run}` \|.*\| `(.+)` \|$", text, re.M)
    flags = re.search(r"^(--.+)$", text, re.M)
    require(found and flags, f"example-logs/README.md has no command of {run}")
    return " \\\n    ".join([found[1], *textwrap.wrap(
        flags[1], 70, break_on_hyphens=False)])


def credits():
    """The README's credits: a point for each sentence, with its web links.

    Links to files become names. The papers are on the same page.
    """
    text = (ROOT / "README.md").read_text("utf-8")
    _, _, text = text.partition("## Credits\n")
    text, _, _ = text.partition(" All papers are")
    require(text, "README.md has no credits")
    text = " ".join(text.split())
    text = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", text)
    return re.sub(r"(?:^|(?<=\.) )(?=[A-Z])", "\n- ", text).strip()


def checklist():
    """The first sentence of each point of the starter's checklist."""
    text = (ROOT / "starter" / "README.md").read_text("utf-8")
    points = re.findall(r"^\d+\. \[ \] (.+(?:\n {3,}.+)*)", text, re.M)
    require(points, "starter/README.md has no checklist")
    return "\n".join(f"{number}. {first_sentence(point)}"
                     for number, point in enumerate(points, 1))


def first_sentence(text):
    """Up to the first full stop, question mark or colon."""
    first = re.split(r"(?<=[.?:])\s", " ".join(text.split()))[0]
    return re.sub(":$", ".", first)


def site(path):
    """{name: value} of what a site file sets; it is read as text."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else ()
    return {name: value.strip("\"'") for line in lines
            if not line.lstrip().startswith("#")
            for name, value in re.findall(
                r"\b((?:WORKSHOP|SBATCH)_\w+)=(\"[^\"]*\"|'[^']*'|\S+)", line)}


# -------------------------------------------------------------------- decks


def write(name, minutes=LENGTHS[-1], settings=None):
    """A deck's Markdown; settings: what site.sh sets, for `site`.

    minutes: of the course, one of `LENGTHS`; the longest has all slides.
    """
    clock = Clock(name, minutes)
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(SLIDES / "source"),
        undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True)
    template.filters["n"] = lambda value: f"{value:,.0f}"
    template.filters["gb"] = lambda value, digits=1: (
        f"{value / 1e9:,.{digits}f} GB")
    template.filters["power"] = power_of_ten
    template.filters["percent"] = lambda value: f"{value:.0%}"
    template.filters["code"] = lambda text: re.sub(
        r"(--[\w-]+)", r"`\1`", text)
    text = template.get_template(f"{name}.md").render(
        **facts(), title=DECKS[name].format(minutes), minutes=minutes,
        clock=clock, rows=[row for row in clock.plan.values()
                           if minutes in row.minutes],
        plan=clock.plan, figure=image, changes=changes,
        count=count, change=title,
        number=number, diff=diff, command=command, credits=credits,
        predict=predict, answer=answer, changed_lines=changed_lines,
        stage_table=stage_table, from_readme=from_readme,
        excerpt=excerpt, hunk=hunk, log=log, printed=printed, done=done,
        mistakes=mistakes, exercise=exercise, cell=cell, kept=kept,
        key_lines=key_lines, now="## What you have now", constants=constants,
        checklist=checklist, site=defaultdict(str, settings or {}),
        references=partial(references, name))
    return re.sub(r"\n{3,}", "\n\n", clock.finish(text))


def power_of_ten(value):
    """8.4e18 as people write it."""
    digits, exponent = f"{value:.1e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans(
        "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076"
        "\u2077\u2078\u2079"))
    return f"{digits} \u00d7 10{raised}"


def image(name):
    """A figure as an image of Markdown, with what it shows in words."""
    heading, about = figures.describe(figures.draw(name))
    caption = f"{heading}. {about}".replace("\n", " ")
    caption = caption.replace("[", "(").replace("]", ")")
    folder = "svg" if name in figures.FIGURES else "source/figures"
    return f"![{caption}]({folder}/{name}.svg)"


def pages(markdown):
    """The deck's slides: [Markdown], without the head."""
    body = markdown.split("---\n", 2)[2]
    return [page.strip() for page in re.split(r"^---$", body, flags=re.M)]
