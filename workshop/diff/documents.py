"""The lessons: which change turns one stage into the next, and why.

A lesson is a Markdown document, a chapter that can be read on its own. It
begins with a title and an introduction, in which a sentence about the changes
ends "and shows where it begins." (the lesson's page for the web, which
`python -m slides --markdown` writes, has whole diffs, and says so there). Then
each change has a heading with its number, its reason in prose, and its anchors
in a fenced block:

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

A paragraph that begins with `**Hint.**` leads to the code in words. It is
shown before the code where an instructor asks for hints, and with a check's
answer.

The code itself is in solutions/: an anchor ties a change to the lines of the
diff between the two stages. `python -m workshop diff STAGE` shows them all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from backstage.files import show_path
from workshop.stages import STAGES, require_lesson

# its kind, its rows, and its end, where it has one
BLOCK = re.compile(r"^```(.*)\n((?:(?!```).*\n)*)(```$)?", re.M)
PREDICT, CHECK_MARKS = "**Predict.** ", "**Predict and check.** "
ANCHORS_SHOWN = "and shows where it begins."
ANSWER_MARKS, HINT = "**Answer.** ", "**Hint.** "


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
    # leads to the code in words, or ""; a picture of the lesson has none
    hint: str = field(default="", repr=False)


def load_changes(stage: str) -> list[Change]:
    """The `Change`s that make the stage, in the order they are taught."""
    require_lesson(stage)
    path = STAGES[stage].lesson
    return parse_changes(path.read_text("utf-8"), show_path(path))


def parse_changes(text: str, name: str) -> list[Change]:
    """The `Change`s of a document; name: what an error calls it.

    Raises `ValueError` with the line in which it is not a lesson.
    """
    def wrong(place: int, complaint: str) -> ValueError:
        line = text.count("\n", 0, place) + 1
        return ValueError(f"{name}, line {line}: {complaint}")

    def require(condition: object, place: int, complaint: str) -> None:
        if not condition:
            raise wrong(place, complaint)

    head, *sections = re.split(r"(?<=\n)(?=#)", text)
    introduced = re.match(r"# .*\n+\S", head) and not BLOCK.search(head)
    require(introduced and sections, 0, "a lesson begins with its title, "
            "'# ...', an introduction in prose only, and change '## 1. ...'")
    changes: list[Change] = []
    end = len(head)
    for number, section in enumerate(sections, 1):
        begin, end = end, end + len(section)
        heading, _, body = section.partition("\n")
        found = re.fullmatch(rf"## {number}\. (\S.*)", heading)
        if found is None:
            raise wrong(begin, f"a change begins with '## {number}. ' and its "
                        "title")
        parts = [" ".join(part.split()) for part in re.split(
            r"\n\s*\n", BLOCK.sub("\n\n", body).strip()) if part]
        asked, answers = ([part for part in parts if part.startswith(begins)]
                          for begins in ((PREDICT, CHECK_MARKS), ANSWER_MARKS))
        hints = [part for part in parts if part.startswith(HINT)]
        prose = [part for part in parts if part not in asked + answers + hints]
        require(prose, begin, "the change has no why")
        require(len(answers) == len(asked) < 2, begin, "a change asks one "
                f"question or none, which has an answer, '{ANSWER_MARKS}...'")
        require(len(hints) < 2, begin, f"a change has one hint, '{HINT}...', "
                "or none")
        blocks = [*BLOCK.finditer(section)]
        require(len(blocks) == 1, begin, "a change has one block of anchors, "
                f"```diff ... ```, and this has {len(blocks)}")
        kind, rows, closed = blocks[0].groups()
        place = begin + blocks[0].start()
        require(kind == "diff" and closed and rows, place, "the block of "
                "anchors begins with ```diff and ends with ```")
        for row in rows.splitlines():
            place = text.index("\n", place) + 1
            require(re.match(r"[+-]\s*\S", row), place,
                    "an anchor is a line of code after + or -")
        change = Change(found[1], "\n\n".join(prose), tuple(
            row[0] + row[1:].strip() for row in rows.splitlines()))
        if asked:
            change.predict = asked[0].split(".** ", 1)[1]
            change.answer = answers[0].split(".** ", 1)[1]
            change.checked = asked[0].startswith(CHECK_MARKS)
        if hints:
            change.hint = hints[0].removeprefix(HINT)
        changes.append(change)
    return changes
