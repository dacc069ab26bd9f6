"""A sharded model's parameters, put together from what each rank has."""

import ast
from types import SimpleNamespace

import pytest
import torch
from conftest import edit

from backstage.errors import UserError
from rankcheck.engine.exits import shorten_message
from rankcheck.engine.findings import Line, fail
from rankcheck.record.tensors import assemble, describe_tensors
from workshop.board import Board
from workshop.check import localise
from workshop.check.command import check_script, make_others
from workshop.check.experiment import Mistake, tell_cause
from workshop.check.lines import lines_as_in, name_lines
from workshop.check.questions.process import check_definitions
from workshop.check.questions.question import TIED_WEIGHTS, assemble_tied
from workshop.diff import page
from workshop.diff.diff import Diff
from workshop.diff.working_copy import apply_changes, reset_to
from workshop.stages import STAGES


def test_a_missing_part_is_a_hole():
    half = {"part": torch.ones(1, 3), "mesh": torch.tensor([0, 1]),
            "placements": [("Shard", 0)], "shape": (2, 3)}
    assert assemble([{"plain": [], "flat": torch.zeros(0),
                      "sharded": {"w": half}}]).holes == ["w"]


@pytest.mark.parametrize(("placements", "split"), [
    ([("Shard", 0), ("Shard", 1)],
     lambda whole, dp, tp: whole.chunk(2)[dp].chunk(2, 1)[tp]),
    # as FSDP shards what tensor parallelism has split
    ([("_StridedShard", 0), ("Shard", 0)],
     lambda whole, dp, tp: whole.chunk(2)[tp].chunk(2)[dp]),
    ([("Replicate", None), ("Shard", 1)],
     lambda whole, dp, tp: whole.chunk(2, 1)[tp])])
def test_the_parts_on_a_mesh_of_two_dimensions(placements, split):
    matrix = torch.arange(16.0).view(4, 4)
    whole = assemble([{"plain": [], "flat": torch.zeros(0), "sharded": {"w": {
        "part": split(matrix, *divmod(rank, 2)), "shape": (4, 4),
        "mesh": torch.arange(4).view(2, 2), "placements": placements}}}
        for rank in range(4)])
    assert not whole.holes and not whole.unequal
    assert torch.equal(whole.tensors["w"], matrix)


def edited(*pairs, stage="ddp"):
    return edit(STAGES[stage].solution.read_text(), *pairs).encode()


def test_next_is_the_first_change_that_is_left():
    std = STAGES["std"].solution
    for made, number in ([], 1), ([1, 2, 4], 3):
        data = Diff("ddp", std).apply(made).encode()
        version = make_others(Diff("ddp", std, data), "next", print)
        assert version.number == number and version.data
    said = []
    assert make_others(Diff("ddp", std, edited()), "next", said.append) is None
    assert said == ["Done: no change is left. `python -m workshop check ddp` "
                    "checks them all."]


def test_a_finished_script_is_no_failure_of_the_next_check(capsys):
    """In a notebook, the check of one change more is no failed one."""
    check_script("ddp", STAGES["ddp"].solution, change="next", events=True)
    board = Board(page.as_calls)
    for line in capsys.readouterr().out.splitlines():
        board.read(line)
    board.end()
    assert board.right is True and not board.findings
    html = board.to_html()
    assert "no change is left" in html and "did not finish" not in html


@pytest.mark.parametrize(("old", "new", "kept"), [
    ("step(model, batch, device, hp", "step(raw_model, batch, device, hp",
     True),
    ("loss = loss / accumulation_steps", "loss = loss", True),
    ("+= self.stride", "+= self.B", False)])
def test_a_line_that_the_lesson_keeps_is_shown(old, new, kept):
    """Where it stands among the lines of a change, its reason is another."""
    diff = Diff("ddp", data=edited((old, new)))
    part, = diff.remaining
    line = localise.kept_lines(diff, [part])
    assert (old in line) == bool(line) == kept


NORM = "        norm = nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)\n"
STEP = "        optimizer.step()\n"


@pytest.mark.parametrize(("old", "new", "moved"), [
    (NORM + STEP, STEP + NORM,  # the same as a step that is earlier
     localise.MovedLines((NORM.strip(),), "later")),
    (STEP, f"        if rank == 0:\n    {STEP}", None),
    (STEP, "", None)])
def test_a_line_that_is_only_moved_is_said_to_be(old, new, moved):
    """The reason of its change may be another than its place."""
    diff = Diff("ddp", data=edited((old, new)))
    items = diff.remaining + diff.other_changes
    assert localise.find_moved(diff, items) == moved
    if moved:  # one of the two differences may be what breaks the script
        assert {localise.find_moved(diff, [item]) for item in items} == {moved}
    said = []
    tell_cause(SimpleNamespace(say=said.append, report=lambda **_: None),
               diff, items, None, Mistake("", "", frozenset(), ""))
    words = "Your script has this line later than the lesson: `norm = nn."
    assert (words in "".join(said)) == bool(moved)


@pytest.mark.parametrize(("text", "says"), [
    ("-         self.position = i\n+         self.position = i + 1\n", "-"),
    ("+         self.position = i + self.offset\n", "+"),
    ("  180 -         self.position = i\n", "-"),
    ("      +         self.position = i + self.offset\n", "+")])
def test_a_diff_with_its_signs_is_called_so(tmp_path, text, says):
    """As git and the lesson show it, and before any process starts."""
    data = edited(("        self.position = i\n", text), stage="std")
    line = 1 + data.decode().splitlines().index(text.splitlines()[0])
    script = tmp_path / "train_gpt2.py"
    script.write_bytes(data)
    assert Diff("ddp", script).script.syntax_error.startswith(
        f"line {line} begins with the {says} of a diff: ")
    with pytest.raises(UserError, match=f"is not Python yet, line {line} "):
        check_script("ddp", script)


def test_a_negative_number_is_no_sign():
    data = edited(("        self.position = i\n",
                   "        self.position = (i\n            - 1 $)\n"),
                  stage="std")
    assert "sign" not in Diff("ddp", data=data).script.syntax_error


def test_a_clone_that_can_only_be_read_is_another_s(monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    for change in (lambda: reset_to("ddp"), lambda: apply_changes("ddp")):
        with pytest.raises(UserError, match="work in a clone of your own"):
            change()


def test_a_long_message_ends_with_a_sentence():
    """As DDP's about a weight without a gradient."""
    words = "No gradient came. " + "It names the reason at length. " * 5
    long = words + "You can enable it by hand, and then all."
    assert shorten_message(long) == words.strip()
    assert shorten_message("x " * 150).endswith("x ...")
    assert shorten_message("short") == "short"


def test_names_without_wrappers():
    weight = torch.ones(2, 3)
    described = describe_tensors([("module._orig_mod.h.0.weight", weight),
                                  ("without", None)])
    assert described["plain"] == [("h.0.weight", (2, 3))]


def test_the_ends_of_a_pipeline_have_one_matrix():
    first = describe_tensors([("transformer.wte.weight", torch.ones(2, 3))])
    last = describe_tensors([("lm_head.weight", torch.ones(2, 3))])
    assert not assemble_tied([first, last]).unequal
    last = describe_tensors([("lm_head.weight", torch.zeros(2, 3))])
    whole = assemble_tied([first, last])
    assert whole.unequal == {TIED_WEIGHTS} and whole.differing == {1: 1.0}


@pytest.mark.parametrize(("text", "missing"), [
    ("import a\n\ndef f(b):\n    c = a.d\n    return [b + c for b in c]\n",
     None),
    ("def f():\n    return g\n\ndef g():\n    return f\n", None),
    ("def f():\n    global a\n    a = 1\n\ndef g():\n    return a\n", None),
    ("from a import *\n\ndef f():\n    return b\n", None),
    ("def f(a):\n    print(a)\n    return lambda: a.b + c\n", ("c", 3)),
    ("class A:\n    x = 1\n\n    def f(self):\n        return x\n", ("x", 5)),
])
def test_a_name_that_nothing_defines(text, missing):
    finding = check_definitions(SimpleNamespace(tree=lambda: ast.parse(text)),
                                None)
    assert missing == (finding and (finding.text.split()[0], *finding.lines))


def test_a_line_is_named_as_in_the_script_that_one_sees():
    yours = b"import a\n\n# mine\nx = 1\ny = 2\n"
    tried = b"import a\nz = 3\nx = 1\ny = 2\n"
    name = lines_as_in(yours, tried)
    finding = fail(["an error (", Line(2), "), in line 1: "],
                   ["not ", Line(3)])
    assert finding.lines == {2}
    named = name_lines(finding, name)
    assert (named.text, named.fix_text) == (
        "an error (the lesson's line `z = 3`), in line 1: ", "not line 4")
    assert name(Line(400)) == "line 400"
