"""The check names the change that makes a script wrong."""

import pytest
from conftest import edit, program

from workshop.check import localise
from workshop.check.command import check_script
from workshop.diff import documents
from workshop.stages import STAGES


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(localise, "TRIES", 1000)


@pytest.mark.parametrize("mistakes", [
    [{0}], [{12}], [{7}], [{3, 9}], [{2, 3, 11}], [{1}, {6}], [{0, 1}, {12}]])
def test_the_smallest_parts_that_are_wrong(mistakes):
    asked = []

    def symptom(items):
        asked.append(items)
        wrong = [mistake for mistake in mistakes if mistake <= set(items)]
        return str(wrong[0]) if wrong else None

    found = list(localise.find_breaking(list(range(13)), symptom))
    assert sorted(map(sorted, found)) == sorted(map(sorted, mistakes))
    assert len(asked) <= 70


def test_no_more_than_it_has_time_for(monkeypatch):
    monkeypatch.setattr(localise, "TRIES", 2)
    assert not list(localise.find_breaking([1, 2, 3],
                                           lambda items: len(items) > 2))


def test_what_is_wrong_for_another_reason_does_not_count():
    """The item 4 needs 9, as a use needs its definition; 6 is the mistake."""
    def symptom(items):
        if (4 in items) != (9 in items):
            return "a name is not defined"
        return "off" if 6 in items else None

    assert list(localise.find_breaking(list(range(13)), symptom)) == [[6]]


def test_the_first_answer_does_not_wait_for_the_second():
    asked = []

    def symptom(items):
        asked.append(items)
        return next((item for item in (2, 5) if item in items), None)

    assert next(localise.find_breaking(list(range(9)), symptom)) == [2]
    assert len(asked) <= 5


def test_other_names_are_no_difference():
    goal = "def f(a, b):\n    c = a + b\n    return c * a\n"
    yours = "def f(a, b):\n    sum_ = a - b  # c\n    return sum_ * a\n"
    assert localise.rename_symbols(yours, goal) == (
        "def f(a, b):\n    c = a - b  # c\n    return c * a\n")
    for kept in ("def f(a, b):\n    c = a + b\n    return d * a\n",
                 "def f(a, b):\n    d = a + b\n    return c * a\n"):
        assert localise.rename_symbols(kept, goal) == kept  # an undefined name
    other = "total = comm.reduce(part)\n"  # another function of a library's
    assert localise.rename_symbols(other,
                                   "total = comm.allreduce(part)\n") == other


def change(title):
    """The number and title of the lesson's change whose title begins so."""
    return next(f"change {number} ({change.title})" for number, change
                in enumerate(documents.load_changes("ddp"), 1)
                if change.title.startswith(title))


@pytest.mark.whole
def test_two_mistakes_in_a_style_of_one_s_own(tmp_path, capsys):
    script = edit(
        STAGES["ddp"].solution.read_text().replace("raw_model", "net").replace(
            "accumulation_steps", "turns"),
        ("self.position += self.stride", "self.position += self.B"),
        ("        dist.all_reduce(report)  # the sum over all ranks\n", ""))
    path = program(tmp_path / "train_gpt2.py", script)
    assert not check_script("ddp", path).ok
    out = capsys.readouterr().out
    for title, line in (
            ("Move on past", "        self.position += self.B"),
            ("Average the losses",
             "        mean_loss, stop = (report / world_size).tolist()")):
        number = 1 + script.splitlines().index(line)
        assert f"The error is in {change(title)}, line {number}" in out, out
    assert out.count("The error is in change") == 2
    # the first is what the check has found; the second shows something else
    assert out.count("With this difference alone, ") == 1
    hint, reason = "Which are its next two", "the samples up to the end of"
    assert out.index("Move on past") < out.index(hint) < out.index(reason)
    assert out.index("The error is in change") < out.index("Not correct yet.")


@pytest.mark.whole
def test_a_script_that_cannot_be_compared(tmp_path, capsys):
    path = tmp_path / "train_gpt2.py"
    script = edit(STAGES["ddp"].solution.read_text(),
                  ("use_device(hp.device, local_rank)",
                   "use_device(hp.device)"))
    path.write_bytes(f"# -*- coding: latin-1 -*-\n# é\n{script}".encode(
        "latin-1"))
    assert not check_script("ddp", path).ok
    out = capsys.readouterr().out
    assert "rank 1 uses device 0" in out and "The error is" not in out
    assert out.rstrip().endswith("Use -v for details.")


def test_what_the_lesson_cannot_do_either_is_no_change():
    """Such as a machine without MPI."""
    assert not list(localise.find_breaking([1, 2],
                                           lambda items: "there is no MPI"))
