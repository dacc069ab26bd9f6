"""The lesson's diff, on scripts as attendees leave them."""

import json
import random
import re

import pytest
from conftest import copy_clone, copy_course, edit, python, workshop

from backstage.errors import UserError
from slides import text as slides
from workshop.diff import render
from workshop.diff.diff import Diff, load_lesson
from workshop.stages import LESSONS, STAGES

STD, DDP = (STAGES[stage].solution.read_text() for stage in ("std", "ddp"))
COUNT = len(load_lesson("ddp").changes)


@pytest.fixture
def look(tmp_path):
    """What the lesson says about a script that holds this text."""
    def look(text, stage="ddp"):
        script = tmp_path / "train_gpt2.py"
        script.write_bytes(text if isinstance(text, bytes) else text.encode())
        return Diff(stage, script)
    return look


def numbers(diff):
    return [item.number for item in diff.remaining]


def made_by(words):
    """The number of DDP's change that adds the line with these words."""
    lesson = load_lesson("ddp")
    line, = (j for j, code in enumerate(lesson.goal.code) if words in code)
    number, = {piece.change + 1 for piece in lesson.pieces
               if piece.j1 <= line < piece.j2}
    return number


# ------------------------------------------------- the lesson, the solution


@pytest.mark.parametrize("old, new, complaint", [
    ("B, T, _ = x.shape", "B, T, _ = x.size()",
     "no change for the hunk that begins with '-B, T, _ = x.shape'"),
    ("loss.backward()", "dist.all_reduce(loss)", "is in 2 lines"),
])
def test_a_lesson_that_drifts_from_its_solution_is_seen(
        tmp_path, old, new, complaint):
    copy_course(tmp_path, "backstage", "workshop", "solutions")
    script = tmp_path / "solutions" / "train_gpt2_ddp.py"
    script.write_text(edit(DDP, (old, new)))
    end = python(tmp_path, "-c", "from workshop.diff.diff import "
                 "load_lesson; load_lesson('ddp')")
    assert end.returncode and complaint in end.stderr


@pytest.mark.parametrize("stage", LESSONS)
def test_changes_keep_their_numbers_in_whatever_order_they_are_made(
        stage, look):
    """Every hunk has a change, and every change a hunk."""
    lesson = load_lesson(stage)  # raises where a hunk or an anchor is lost
    text = lesson.start.path.read_text()
    assert all(item.title and item.why.endswith(".")
               for item in look(text, stage).remaining)
    order = list(range(1, len(lesson.changes) + 1))
    random.Random(0).shuffle(order)
    for k, number in enumerate(order):
        diff = look(text, stage)
        assert numbers(diff) == sorted(order[k:]) and not diff.other_changes
        text = diff.apply([number])
    # not only the code, but comments and blank lines, too
    assert text == lesson.goal.path.read_text()


# ------------------------------------------------ scripts as they are edited


@pytest.mark.parametrize("text", [
    DDP, DDP.replace("\n", "\r\n"), DDP.replace("\n", "  \n") + "\n\n",
    re.sub(r" *# (the sum|gradients are).*", "", DDP),
    DDP.replace("    rank = int", "    # my own words\n    rank = int"),
    DDP.replace("\n\n", "\n"), DDP.rstrip(), "\ufeff" + DDP,
    re.sub("^( {4})+", lambda it: "\t" * (len(it[0]) // 4), DDP, flags=re.M),
    edit(DDP, ('rank = int(os.environ["LOCAL_RANK"])',
               "rank = int( os.environ['LOCAL_RANK'] )"),
         ("dist.all_gather_object(texts, ",
          "dist.all_gather_object(\n                texts, "))], ids=range(10))
def test_done_also_in_another_spelling(look, text):
    diff = look(text)
    assert not diff.remaining and not diff.other_changes
    done = f"Done: all {COUNT} changes are made"
    assert render.headline(diff).startswith(done)
    assert done in render.to_html(diff) and done in render.to_text(diff)
    # and so it is while another change is left
    diff = look(edit(text, ('Run("ddp"', 'Run("std"')))
    assert numbers(diff) == [made_by('Run("ddp"')] and not diff.other_changes


def change_words(text):
    """With docstrings of one's own, and messages of one's own."""
    text = re.sub(r'"""[^"]+"""', '"""Mine, and\n    no other."""', text)
    text = re.sub(r'( +def \w+\(self.*:\n)(?! +""")',
                  r'\1            """Something of mine."""\n', text)
    text = text.replace(' samples is not "', ' samples cannot be "')
    return edit(text, ('f"> {run', 'f"- " f"{run'))


@pytest.mark.parametrize("stage", LESSONS)
def test_docstrings_and_messages_need_not_be_typed(stage, look):
    goal = STAGES[stage].solution.read_text()
    own = change_words(goal)
    assert own.count("Mine, and") > 9
    for text in (own, goal.replace('"""', "# ", 1).replace('"""', "", 1)):
        diff = look(text, stage)
        assert not diff.remaining and not diff.other_changes
    # a change that is left is made with the lesson's
    start = load_lesson(stage).start.path.read_text()
    diff = look(change_words(start), stage)
    assert numbers(diff) == list(range(1, diff.total + 1))
    assert not diff.other_changes
    # and what is not Python yet has the same changes left
    broken = look(own + "\n(", stage)
    assert broken.script.syntax_error and not broken.remaining


def test_the_first_stage_is_made_by_no_lesson(look):
    with pytest.raises(UserError, match="no lesson leads to a stage std"):
        look(STD, "std")


@pytest.mark.parametrize("old, new", [
    ("{samples_per_round}: every", "{rank}: every"),
    ('preset: Literal["tiny"', 'preset: Literal["toy"'),
    ('os.environ["LOCAL_RANK"]', 'os.environ["LOCAL RANK"]'),
    ("    require(S % samples", "require(S % samples")])
def test_what_a_message_computes_counts_and_so_do_names(look, old, new):
    diff = look(edit(DDP, (old, new)))
    assert diff.remaining or diff.other_changes


@pytest.mark.parametrize("place, old, new", [
    ("main", "train_data.seek(first_step * S)", "train_data.seek(first_step)"),
    ("MLP", "class MLP(nn.Module)", "class MPL(nn.Module)"),
    ("get_lr", "        return max_lr * (step + 1)",
     "    return max_lr * (step + 1)")])
def test_a_slip_elsewhere_is_one_difference(look, place, old, new):
    for text, left in ((STD, COUNT), (DDP, 0)):
        diff = look(edit(text, (old, new)))
        assert len(diff.remaining) == left and len(diff.other_changes) == 1
        assert "1 other difference" in render.headline(diff)
        name, where = render.title(diff, diff.other_changes[0])
        assert name == "Not in the lesson"
        line = edit(text, (old, new)).split(new)[0].count("\n") + 1
        assert where.startswith(f"line {line}, ")
        assert place == "MLP" or where.endswith(f"in {place}")
        assert "Done" not in render.headline(diff)


@pytest.mark.parametrize("old, new", [
    ('"WORLD_SIZE"])', '"WORLDSIZE"])'),
    ("import nullcontext", "import nulcontext"),
    ("rank * B, world_size", "rank + B, world_size"),
    ("if is_last_microbatch else", "if not is_last_microbatch else"),
    ("    dist.all_reduce(report)", "    dist.al_reduce(report)"),
    ("if rank == 0 and save:", "if rank = 0 and save:"),
])
def test_a_slip_in_a_change_is_that_change(look, old, new):
    number = made_by(old.strip())
    diff = look(edit(DDP, (old, new)))
    assert numbers(diff) == [number] and not diff.other_changes
    # alone, with all the others still to be made
    others = set(range(1, COUNT + 1)) - {number}
    text = look(STD).apply([number])
    diff = look(edit(text, (old, new)))
    assert set(numbers(diff)) == others | {number} and not diff.other_changes
    assert look(diff.apply([number])).remaining == look(text).remaining


def test_the_end_of_a_statement_that_resembles_nothing_is_no_own_line(look):
    """It closes a bracket of the lines before it, which are the change's."""
    end = "                     rank, world_size)\n"
    for text in (DDP, look(STD).apply([made_by("shards, B, T, rank,")])):
        before = look(text)
        diff = look(edit(text, (end, "                     0, 1)\n")))
        left, = {*numbers(diff)} - {*numbers(before)}
        assert not diff.other_changes and diff.apply([left]) == text


def test_what_is_left_of_a_change_that_is_half_made(look):
    diff = look(edit(STD, ("import time\n", "import os\nimport time\n")))
    assert numbers(diff) == list(range(1, COUNT + 1))
    text = render.to_text(diff)
    shown = [line for line in text.splitlines() if " + " in line]
    assert not any(line.endswith("import os") for line in shown)
    assert any(line.endswith("import nullcontext") for line in shown)
    # the new line is there, the old one as well
    diff = look(edit(DDP, ('    run = Run("ddp"', '    run = Run("std", hp, '
                           'config, max_steps, device)\n    run = Run("ddp"')))
    number = made_by('Run("ddp"')
    assert numbers(diff) == [number] and not diff.other_changes
    assert diff.apply([number]) == DDP


def test_own_lines_are_differences_of_their_own_and_stay(look):
    own = 'print("hello")\n'
    places = ("import math\n", "    device = use_device(hp.device)\n",
              "            loss = loss / accumulation_steps\n")
    for place in places:
        indent = re.match(" *", place)[0]
        for text in (edit(STD, (place, place + indent + own)),
                     edit(STD, (place, indent + own + place))):
            diff = look(text)
            assert numbers(diff) == list(range(1, COUNT + 1))
            made = look(diff.apply(numbers(diff)))
            assert not made.remaining
    # for a script that is ready, it says what can tell
    made = look(edit(DDP, ("import math\n", "import math\n" + own)))
    assert not made.remaining and len(made.other_changes) == 1
    assert "check ddp" in render.next_command(made)


def test_a_syntax_error_is_one_line_that_says_where(look):
    broken = edit(DDP, ("dist.all_reduce(report)", "dist.all_reduce(report"))
    diff = look(broken)
    line = broken[:broken.index("(report ")].count("\n") + 1
    complaint = next(render.warnings(diff))
    assert f"line {line}" in complaint and "\n" not in complaint
    assert complaint in render.to_text(diff)
    assert numbers(diff) == [made_by("report = torch")]
    assert not diff.other_changes
    mixed = edit(DDP, ("        dist.all_reduce(report)",
                       "\tdist.all_reduce(report)"))
    assert "Done" not in render.headline(look(mixed))


def test_scripts_that_are_none(look):
    assert look("").remaining  # and no error
    assert len(look("print('hello')\n" * 300).remaining) == COUNT


# ------------------------------------------------------------------ the view


@pytest.mark.whole
def test_the_view(look, snapshot, monkeypatch):
    """A change that is next, two below it, and a line of one's own."""
    monkeypatch.setattr(render, "saved_at", lambda path: "saved at noon")
    every, own = {*range(1, COUNT + 1)}, ("GPTConfig(),", "GPTConfig(1<2),")
    one_left = look(look(STD).apply(every - {7}))
    diff = look(edit(look(STD).apply(every - {7, 9, 11}), own))
    for name, view in {
            "diff.html": render.to_html(diff),
            "diff-whole.html": render.to_html(diff, whole=True),
            "diff-hints.html": render.to_html(one_left, hints=True),
            "diff.txt": render.to_text(diff),
            "diff-hints.txt": render.to_text(diff, hints=True),
            "diff-7.txt": render.to_text(diff, colour=True, number=7)}.items():
        snapshot(name, view.replace(str(diff.script.path), "train_gpt2.py"))
    html = render.to_html(diff)  # a line is read aloud
    assert html.count(json.dumps(render.headline(diff))) == 1
    assert html.count('setAttribute("role", "status")') == 1
    ready = look(DDP)
    assert "Show the code" not in render.to_html(ready, hints=True)
    assert "--no-hints" not in render.to_text(ready, hints=True)
    assert "Change 3 is made." in render.to_text(ready, number=3)
    with pytest.raises(UserError, match=f"1 to {COUNT}$"):
        render.to_text(diff, number=COUNT + 1)


@pytest.mark.parametrize("stage, number", [
    ("ddp", 5), ("ddp", 6), ("ddp", 7), ("ddp", 8), ("lit", 2), ("lit", 4)])
def test_what_is_typed_has_a_hint_without_its_code(stage, number):
    """In words alone: names such as `self.stride` are code."""
    hint = load_lesson(stage).changes[number - 1].hint
    assert hint
    for line in slides.diff_of(stage, number).splitlines():
        if line.startswith("+"):
            assert line[1:].strip() not in hint
            for name in re.findall(r"\w+[._]\w+", line):
                assert name not in hint


def test_a_hint_comes_a_step_before_the_code(look):
    """In a notebook by clicks, in a terminal by commands."""
    diff = look(look(STD).apply({*range(1, COUNT + 1)} - {7, 9}))
    hint = "Which are its next two"
    html = render.to_html(diff, hints=True)
    steps = ["Give a hint", hint, "Show the lines", "Show the code"]
    assert sorted(map(html.index, steps)) == [*map(html.index, steps)]
    assert html.count("Give a hint") == 1  # change 9 has none
    assert hint not in render.to_html(diff)
    every = render.to_text(diff, hints=True)
    assert hint not in every
    assert "A hint: `python -m workshop diff ddp 7 --hints`" in every
    seventh = render.to_text(diff, hints=True, number=7)
    assert f"Hint: Rank 0 has read samples 0 and 1. {hint}" in seventh
    assert "self.stride" not in seventh
    assert hint not in render.to_text(diff, number=7)


def test_the_next_change_is_the_one_that_was_touched_last(look):
    """Or what comes after that."""
    diff = look(look(STD).apply([1, 2, 4]))
    assert '<h3 id="ws-ddp-3"' in render.to_html(diff)
    own = look(edit(diff.apply([5, 9]), ("= rank * B,", "= rank,")))
    for mine, before, number in ((own, diff, 5), (look(own.apply([5])), own,
                                                  6)):
        mine.go_on_from(before)
        assert f'<h3 id="ws-ddp-{number}"' in render.to_html(mine)


def test_a_reset_to_the_start_of_a_lesson_begins_with_its_first_change(look):
    """The lines of another stage that it replaces are no change's."""
    std, fsdp = look(STD, "tp"), look(STAGES["fsdp"].solution.read_text(),
                                      "tp")
    for now, before in (fsdp, std), (std, fsdp):
        now.go_on_from(before)
        assert now.at == 1


@pytest.mark.whole
def test_an_instructor_asks_for_hints_in_one_place(tmp_path):
    """site.sh: a notebook's cell reads it, a shell has it from activate.sh."""
    copy_clone(tmp_path)
    (tmp_path / "site.sh").write_text("export WORKSHOP_HINTS=yes\n")
    cells = python(
        tmp_path, "-c", "from workshop.notebook.cells import diff\n"
        "for flags in ({}, {'hints': False}): print(diff('ddp', **flags), "
        "end='---')").stdout.split("---")
    commands = (workshop(tmp_path, "diff", "ddp", *more, WORKSHOP_HINTS="yes")
                for more in ((), ("--no-hints",)))
    for folded, whole in (cells[:2], commands):
        assert "gradient_as_bucket" not in folded
        assert "gradient_as_bucket" in whole
    assert not render.wants_hints({"WORKSHOP_HINTS": "no"})


@pytest.mark.parametrize("stage, text, start", [
    ("lit", STD, "ddp"), ("fsdp", edit(STD, ("import math\n", "")), "ddp"),
    ("ddp", DDP.replace("# the sum", "# it"), None), ("ddp", STD, None),
    ("lit", DDP, None)])
def test_the_script_of_another_stage_is_told_where_to_start(
        look, stage, text, start):
    advice = render.next_command(look(text, stage))
    assert ("the lesson starts from" in advice) == bool(start)
    if start:
        assert advice.startswith("This is the stage std")
        assert f"`python -m workshop reset {start}`" in advice
