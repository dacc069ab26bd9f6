"""The lessons: which change turns one stage into the next, and why.

A lesson is a Markdown document, a chapter that can be read on its own. It
begins with a title and an introduction. Then each change has a heading with
its number, its reason in prose, and its anchors in a fenced block:

    ## 3. Ask the launcher who this process is

    The launcher starts the same script several times ...

    ```diff
    -rank, world_size = 0, 1
    +if "RANK" not in os.environ:
    ```

A paragraph that begins with `**Predict.**` is a question to answer before the
change is made, and one that begins with `**Answer.**` is its answer. Where the
check of this change alone, left out, gives the answer, the question begins
with `**Predict and check.**`, and the answer quotes the check:

    **Answer.** Both take device 0. The check says: `rank 1 asks for ...`.

The code itself is in solutions/: an anchor ties a change to the lines of the
diff between the two stages. `python -m workshop diff STAGE` shows them all.
"""

import re
from dataclasses import dataclass

from backstage.errors import require
from backstage.files import show_path
from workshop.stages import LESSONS, STAGES

FENCE = "```"
PREDICT, CHECK = "**Predict.** ", "**Predict and check.** "
ANSWER = "**Answer.** "


@dataclass
class Change:
    """One thing to teach.

    why: the reason, in paragraphs with an empty line between them.

    anchors: the lines of the diff where the change begins, with their sign
    and without their indentation: "+import os", "-rank = 0". Decorators
    above an anchor belong to it. The change extends to the next anchor, or
    until three lines in a row are the same in both stages; what follows
    those needs an anchor again. Where a change begins among replaced lines,
    name both the first line removed and the first line added.
    """

    title: str
    why: str
    anchors: tuple[str, ...]
    predict: str = ""  # a question, or "" where the lesson has none
    answer: str = ""  # to the question
    checked: bool = False  # the check of this change alone answers it


def load(stage):
    """The `Change`s that make the stage, in the order they are taught."""
    require(stage in LESSONS, f"no lesson makes a stage {stage}: choose from "
            f"{', '.join(LESSONS)}")
    path = STAGES[stage].lesson
    return parse(path.read_text("utf-8"), show_path(path))


def parse(text, name):
    """The `Change`s of a document; name: what an error calls it.

    Raises `ValueError` with the line in which it is not a lesson.
    """
    def require(condition, line, complaint):
        if not condition:
            raise ValueError(f"{name}, line {line}: {complaint}")

    head, *sections = split(text)
    begins = head.heading.startswith("# ") and head.prose and not head.blocks
    require(begins and sections, head.line, "a lesson begins with its title, "
            "'# ...', an introduction in prose only, and change '## 1. ...'")
    changes = []
    for number, section in enumerate(sections, 1):
        found = re.fullmatch(rf"## {number}\. (\S.*)", section.heading)
        require(found, section.line,
                f"a change begins with '## {number}. ' and its title")
        asked = [part for part in section.prose
                 if part.startswith((PREDICT, CHECK))]
        answers = [part for part in section.prose if part.startswith(ANSWER)]
        prose = [part for part in section.prose
                 if part not in asked + answers]
        require(prose, section.line, "the change has no why")
        require(len(answers) == len(asked) < 2, section.line, "a change asks "
                f"one question or none, which has an answer, '{ANSWER}...'")
        require(len(section.blocks) == 1, section.line, "a change has one "
                f"block of anchors, {FENCE}diff ... {FENCE}, and this has "
                f"{len(section.blocks)}")
        (line, kind, closed, rows), = section.blocks
        require(kind == "diff" and closed and rows, line, "the block of "
                f"anchors begins with {FENCE}diff and ends with {FENCE}")
        for k, row in enumerate(rows, line + 1):
            require(row[:1] in ("+", "-") and row[1:].strip(), k,
                    "an anchor is a line of code after + or -")
        changes.append(Change(found[1], "\n\n".join(prose), tuple(
            row[0] + row[1:].strip() for row in rows),
            *(part.split(".** ", 1)[1] for part in asked + answers),
            checked="".join(asked).startswith(CHECK)))
    return changes


@dataclass
class Section:
    """A heading, and below it paragraphs and blocks.

    blocks: lists [line, kind, whether it has an end, rows].
    """

    line: int  # the heading's, from 1
    heading: str
    prose: list
    blocks: list


def split(text):
    """The document's sections: each begins at a heading outside blocks."""
    sections, inside, fresh = [], False, True  # fresh: a paragraph begins
    for number, row in enumerate(text.splitlines(), 1):
        if number == 1 or (row.startswith("#") and not inside):
            section = Section(number, row, [], [])
            sections.append(section)
            fresh = True
        elif row.startswith(FENCE) and not inside:
            kind = row[len(FENCE):].strip()
            section.blocks.append([number, kind, False, []])
            inside = fresh = True
        elif row.rstrip() == FENCE:
            section.blocks[-1][2], inside = True, False
        elif inside:
            section.blocks[-1][3].append(row)
        elif not row.strip():
            fresh = True
        elif fresh:
            section.prose.append(row.strip())
            fresh = False
        else:
            section.prose[-1] += " " + row.strip()
    return sections
