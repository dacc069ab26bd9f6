"""The fault bench: its registry, its cases, scores and results.

`--tables` runs the scripts of all cases; without it, those of one.
"""

import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from rankcheck.bench import __main__ as command
from rankcheck.bench import asking, page, peers, results, tools, twins
from rankcheck.bench.cases import (
    FIELDS,
    HANG,
    KINDS,
    LISTS,
    SILENT,
    TWINS,
    find_folder,
    load_cases,
    select,
)
from rankcheck.bench.choice import TOOLS, choose_installed, choose_tools
from rankcheck.bench.results import ResultRow, Results
from rankcheck.bench.scoring import Score, Statement, ToolAnswer, score
from rankcheck.engine.ranks import RankExit
from rankcheck.system.errors import UserError
from rankcheck_testing.support import (
    HOUSE,
    needs,
    program,
    python,
    wait_for,
)

FOLDER = HOUSE / "bench"
CASES = load_cases(FOLDER)
AT_ONCE = {"divided-by-world-size"}  # by `pytest` alone
HUNG = 12.0  # seconds after which a script that does not end hangs


def make_params(group):
    """Return a test's parameters: the cases of a group."""
    params = []
    for case in CASES:
        if case.group == group:
            marks = [] if case.name in AT_ONCE else [pytest.mark.table]
            params.append(pytest.param(case, id=case.name, marks=marks))
    return params


# ------------------------------------------------------------ the registry


def test_the_registry_has_cases_of_every_kind():
    for group, kinds in KINDS.items():
        found = {case.kind for case in CASES if case.group == group}
        assert found == set(kinds)
    for group, least in (SILENT, 80), (HANG, 40):
        some = [case for case in CASES if case.group == group]
        held_out = [case for case in some if case.held_out]
        assert len(some) >= least
        assert len(held_out) >= 0.3 * len(some)


def test_the_kinds_of_findings_exist():
    """A kind that rankcheck does not know would never match."""
    sources = (HOUSE / "src" / "rankcheck").rglob("*.py")
    text = "".join(file.read_text("utf-8") for file in sources
                   if file.parent.name != "bench")
    known = {*re.findall(r'"([a-zA-Z][\w /-]+)"', text),
             "unequal-weights"}  # written as f"unequal-{key}"
    assert {kind for case in CASES for kind in case.kinds} <= known


def test_each_folder_is_in_the_registry():
    folders = {path.name for path in (FOLDER / "cases").iterdir()}
    assert folders == {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_scripts_are_small_and_differ_in_few_lines(case):
    texts = [case.script(twin).read_text() for twin in TWINS]
    for text in texts:
        compile(text, "train.py", "exec")
        assert 20 <= text.count("\n") <= 80
        assert case.name not in text
    changed = [line for line in difflib.ndiff(*map(str.splitlines, texts))
               if line.startswith(("-", "+"))]
    assert 1 <= len(changed) <= 16


def test_the_schema_describes_the_registry():
    schema = json.loads((FOLDER / "schema.json").read_text())
    entry = schema["properties"]["cases"]["items"]
    assert set(entry["properties"]) == set(entry["required"]) == set(FIELDS)
    kinds = {kind for kinds in KINDS.values() for kind in kinds}
    assert set(entry["properties"]["kind"]["enum"]) == kinds
    assert set(entry["properties"]["group"]["enum"]) == set(KINDS)


def copy_registry(folder, **changes):
    """Write a registry with one case, some fields of which are changed."""
    document = json.loads((FOLDER / "registry.json").read_text())
    entry = {**document["cases"][0], **changes}
    document["cases"] = [{key: value for key, value in entry.items()
                          if value is not None}]
    (folder / "registry.json").write_text(json.dumps(document))
    name = document["cases"][0].get("name", "x")
    shutil.copytree(FOLDER / "cases" / CASES[0].name, folder / "cases" / name,
                    dirs_exist_ok=True)


def test_a_copied_registry_is_read(tmp_path):
    copy_registry(tmp_path)
    assert load_cases(tmp_path) == [CASES[0]]


@pytest.mark.parametrize(("changes", "says"), [
    *[({name: None}, f"has no {name}") for name in FIELDS if name != "name"],
    ({"colour": "red"}, "has colour, which is no field"),
    ({"fault": " "}, "fault is no text"), ({"names": []}, "names is empty"),
    *[({name: "x"}, f"{name} is no list") for name in LISTS],
    ({"kind": "deadlock"}, "deadlock is no kind of the group silent"),
    ({"ranks": ["0"]}, "ranks is no list of ranks"),
    ({"processes": 0}, "processes is no number"),
    ({"processes": 3, "nodes": 2}, "cannot be divided"),
    ({"held_out": 1}, "held_out is not true or false"),
    ({"launch": "ssh"}, "ssh is no launcher"),
    ({"report": {"repository": "a/b"}}, "not a repository and a number"),
    ({"report": {"repository": "b", "number": 1}}, "no owner/name"),
    ({"report": {"repository": "a/b", "number": 0}}, "no number")])
def test_an_entry_that_is_not_complete_is_named(changes, says, tmp_path):
    copy_registry(tmp_path, **changes)
    with pytest.raises(UserError, match=says) as error:
        load_cases(tmp_path)
    assert "\n" not in str(error.value) and "fix:" in str(error.value)


def test_a_missing_script_or_registry_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has no registry\.json.*fix: clone"):
        find_folder(str(tmp_path))
    copy_registry(tmp_path)
    (tmp_path / "cases" / CASES[0].name / "right.py").unlink()
    with pytest.raises(UserError, match=r"has no right\.py"):
        load_cases(tmp_path)
    (tmp_path / "registry.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_cases(tmp_path)
    (tmp_path / "registry.json").write_text('{"schema": 0}')
    with pytest.raises(UserError, match="does not have schema 1"):
        load_cases(tmp_path)


def test_cases_are_selected_by_name_kind_and_group():
    assert select(CASES, []) == CASES
    assert select(CASES, ["no-sampler", "data"])[0].name == "no-sampler"
    assert {case.kind for case in select(CASES, ["RNG"])} == {"RNG"}
    assert {case.group for case in select(CASES, [HANG])} == {HANG}
    with pytest.raises(UserError, match="no case is called colours"):
        select(CASES, ["colours"])


# --------------------------------------------------------------- the twins


@pytest.mark.parametrize("case", make_params(SILENT))
def test_the_twins_compute_something_else(case):
    """And a twin that is run again computes the same."""
    needs(*case.needs)
    right, again = twins.run_twin(case, "right"), twins.run_twin(case, "right")
    wrong = twins.run_twin(case, "wrong")
    for run in right, again, wrong:
        assert run.ended, run.output
        assert run.losses
    assert not twins.find_differences(right, again)
    assert twins.find_differences(right, wrong)


@pytest.mark.parametrize("case", make_params(HANG))
def test_one_twin_ends_and_the_other_hangs_or_dies(case):
    needs(*case.needs)
    right = twins.run_twin(case, "right")
    assert right.ended, right.output
    assert not twins.run_twin(case, "wrong", limit=HUNG).ended


def observe(norms=((1.0, 2.0),), losses=(3.0,), files=("a.txt",)):
    """Return a run in which rank 0 has done this."""
    seen = twins.Observation([list(one) for one in norms], list(files))
    return twins.TwinRun([0], list(losses), [seen], "")


@pytest.mark.parametrize(("changes", "found"), [
    ({}, []), ({"norms": ((1.0, 2.0 + 1e-7),)}, []),
    ({"norms": ((1.0, 2.001),)}, ["weights"]),
    ({"norms": ((1.0,),)}, ["weights"]), ({"losses": (3.1,)}, ["losses"]),
    ({"losses": (float("nan"),)}, ["losses"]), ({"files": ()}, ["files"])])
def test_what_differs_between_two_runs(changes, found):
    assert twins.find_differences(observe(), observe(**changes)) == found


def test_times_in_the_names_of_files_do_not_count():
    times = 17_000_000_000, 18_000_000_000
    names = [f"run-{number}/a.pt" for number in times]
    same = observe(files=names[:1])
    assert not twins.find_differences(same, observe(files=names[1:]))
    assert twins.find_differences(same, observe(files=names)) == ["files"]


# -------------------------------------------------------------- the scores


CASE = next(case for case in CASES if case.name == "no-sampler")
NAMES = Statement("all 2 ranks read the same samples", is_cause=True)
NAMES_IN_3 = Statement("all 3 ranks read the same samples", is_warning=True)
EFFECT = Statement("the losses differ")
ELSE = Statement("the optimizer is another one", is_cause=True)
WARNING = Statement("the optimizer is another one", is_warning=True,
                    is_cause=True)
NO_ANSWER = Statement("not run: do all read the same samples?",
                      is_problem=False)
SHOWN = Statement("all 2 ranks read the same samples", is_problem=False,
                  describes=True)


@pytest.mark.parametrize(("wrong", "right", "expected"), [
    ([NAMES], [], Score.NAMED), ([EFFECT, NAMES], [], Score.NAMED),
    ([WARNING, NAMES], [], Score.NAMED), ([EFFECT], [], Score.NOTICED),
    ([SHOWN], [], Score.NOTICED), ([SHOWN], [SHOWN], Score.MISSED),
    ([NAMES_IN_3], [SHOWN], Score.MISSED),
    ([], [], Score.MISSED), ([NO_ANSWER], [], Score.MISSED),
    ([WARNING], [], Score.MISSED), ([ELSE, NAMES], [], Score.FALSE),
    ([NAMES, ELSE], [], Score.NAMED), ([NAMES], [EFFECT], Score.FALSE),
    ([NAMES], [WARNING], Score.NAMED), ([NAMES], [NO_ANSWER], Score.NAMED)])
def test_what_answers_are_worth(wrong, right, expected):
    found = score(CASE, ToolAnswer(tuple(wrong), 0.0),
                  ToolAnswer(tuple(right), 0.0))
    assert found.score is expected
    assert found.false_warnings == right.count(WARNING)


@pytest.mark.parametrize(("kind", "ranks", "text", "expected"), [
    ("rank killed", (1,), "it is gone", Score.NAMED),
    ("rank killed", (0,), "it is gone", Score.NOTICED),
    ("rank failed", (1,), "it is gone", Score.NOTICED),
    ("rank failed", (0, 1), "rank 1 got SIGKILL", Score.NAMED),
    ("", (), "rank 1 got SIGKILL", Score.NAMED)])
def test_kinds_and_ranks_count_before_words(kind, ranks, text, expected):
    case = next(case for case in CASES if case.name == "killed-for-memory")
    statement = Statement(text, kind=kind, ranks=ranks)
    found = score(case, ToolAnswer((statement,), 0.0), ToolAnswer((), 0.0))
    assert found.score is expected


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("lock-left-behind", "rank 0 is in time.sleep", Score.NAMED),
    ("lock-left-behind", "rank 1 is in time.sleep", Score.NOTICED),
    ("lock-left-behind", "rank 0 runs", Score.MISSED),
    ("receive-without-send", "deadlock in work.wait", Score.NOTICED),
    ("receive-without-send", "rank 0 is in work.wait", Score.NOTICED)])
def test_what_a_description_is_worth(name, text, expected):
    """It names a fault only where nothing can be proven."""
    case = next(case for case in CASES if case.name == name)
    shown = Statement(text, is_problem=False, describes=True)
    found = score(case, ToolAnswer((shown,), 0.0), ToolAnswer((), 0.0))
    assert found.score is expected


def test_a_consequence_is_not_a_wrong_reason():
    case = next(case for case in CASES if case.name == "around-the-wrapper")
    follows = Statement("the weights of rank 1 are not rank 0's",
                        is_cause=True)
    found = score(case, ToolAnswer((follows,), 0.0), ToolAnswer((), 0.0))
    assert found.score is Score.NOTICED


def test_the_questions_of_verify_that_give_no_reason_exist():
    from rankcheck.verification.questions import QUESTIONS

    assert {question.title for question in QUESTIONS} >= tools.EFFECTS


@pytest.mark.parametrize(("text", "status", "says", "is_cause"), [
    ('File "/x/train.py", line 7, in reduce\n  dist.all_reduce(x)\n'
     "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 "
     "...", 1, r"rank 1 in line 7, in reduce: dist\.all_reduce\(x\): "
     "Detected mismatch", True),
    ("RuntimeError: Rank 0 failed to pass monitoredBarrier in 9 ms", 1,
     "rank 1: .*failed to pass monitoredBarrier", False),
    ("ValueError: no label", 1, "rank 1: ValueError: no label", True),
    ("", -9, "rank 1: ended by SIGKILL", True),
    ("", -6, "rank 1: ended by SIGABRT", False),
    ("", None, "rank 1: still runs", False)])
def test_what_a_log_says(text, status, says, is_cause):
    found = tools.describe_end(1, RankExit(status, "", text))
    assert re.match(says, found.text) and found.is_cause is is_cause
    assert tools.describe_end(1, RankExit(0, text, "")) is None


def test_a_stack_is_read_by_its_innermost_line(tmp_path):
    (tmp_path / "train.py").write_text("def load():\n    wait()\nload()\n")
    frames = [{"short_filename": "queue.py", "name": "get", "line": 9},
              {"short_filename": "train.py", "name": "load", "line": 2},
              {"short_filename": "train.py", "name": "<module>", "line": 3}]
    found = tools.find_stand(frames, 1, tmp_path)
    assert str(found) == "rank 1 is in line 2, in load: wait()"
    assert tools.find_stand(frames[:1], 1, tmp_path) is None


def test_a_process_is_found_by_its_folder_and_its_rank(tmp_path):
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "RANK": "3"})
    with child:
        assert child.stdout.readline() == "ready\n"
        assert tools.processes_in(tmp_path) == [child.pid]
        assert tools.rank_of_process(child.pid, 0) == 3
        child.stdin.close()
    assert not tools.processes_in(tmp_path)


def test_what_a_script_has_started_goes_with_its_folder():
    """It may wait for ever, as a process does that fills a queue."""
    sleep = ["sleep", "600"]
    with twins.empty_folder() as folder:
        (folder / "work").mkdir()
        shell = subprocess.Popen(sleep, cwd=folder)
        left = subprocess.Popen(sleep, cwd=folder / "work", env={
            **os.environ, twins.FOLDER: str(folder)})
        elsewhere = subprocess.Popen(sleep, env={
            **os.environ, twins.FOLDER: str(folder)})
    try:
        assert left.wait(10) == -signal.SIGKILL
        assert shell.poll() is None and elsewhere.poll() is None
    finally:
        for process in shell, elsewhere:
            process.kill()
            process.wait()


@pytest.mark.whole
def test_what_a_job_has_left_is_ended_and_nothing_else(tmp_path):
    """Each rank has a session of its own; so has a shell in the folder."""
    program(tmp_path / "train.py", "import time\ntime.sleep(600)\n")
    words = [sys.executable, "-m", "rankcheck", "why", "run", "--",
             sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node", "2", "train.py"]
    shell = subprocess.Popen(["sleep", "600"], cwd=tmp_path)
    try:
        with tools.started(words, tmp_path, tmp_path / "records"):
            wait_for(lambda: {0, 1} <= {
                tools.rank_of_process(pid, -1)
                for pid in tools.processes_in(tmp_path)}, 60)
        assert tools.processes_in(tmp_path) == [shell.pid]
    finally:
        shell.kill()
        shell.wait()


MISMATCH = ("error msg: Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH,"
            " Expected collective type: 'broadcast'")


@pytest.mark.parametrize(("text", "status", "says", "ranks", "is_cause"), [
    (f"x\n{MISMATCH}\ny", 0, MISMATCH, (1,), True),
    ("missing ranks: {0, 3}", 0, "missing ranks: {0, 3}", (0, 3), False),
    ("KeyError: 'pg'", 1, "it ended with an error: KeyError: 'pg'", (),
     False)])
def test_what_torchfrtrace_says(text, status, says, ranks, is_cause):
    [found] = peers.read_analysis(text, status)
    assert (found.text, found.ranks, found.is_cause) == (
        says, ranks, is_cause)
    assert found.is_problem is (status == 0)
    assert not peers.read_analysis("all is well", 0)


@pytest.mark.table
def test_torchfrtrace_is_asked_about_dumps_of_gloo():
    case = next(case for case in CASES if case.name == "log-folder-on-rank-0")
    row = asking.try_case(peers.FlightRecorder(), case)
    assert row.score == "named", row
    assert row.wrong[0].kind == "collective mismatch"
    assert not row.right


def test_invariants_that_are_violated_are_read_once(tmp_path):
    folder = tmp_path / "checked"
    folder.mkdir()
    line = '  "text_description": "weights are equal",'
    (folder / "failed_0.log").write_text(f"{{\n{line}\n{line}\n}}\n")
    [found] = peers.read_violated(folder)
    assert found == "weights are equal"


def test_a_tool_that_does_not_apply_is_never_missed():
    for tool in TOOLS:
        for case in CASES:
            if tool.name != "TORCH_DISTRIBUTED_DEBUG=DETAIL" and (
                    tool.why_not(case)):
                assert asking.try_case(tool, case).score == "not applicable"


def test_slow_tools_are_asked_only_if_they_are_named():
    assert all(not tool.is_slow for tool in choose_tools([]))
    [slow] = [tool.name for tool in TOOLS if tool.is_slow]
    assert [tool.name for tool in choose_tools([slow])] == [slow]


def test_a_tool_that_is_not_installed_is_not_asked(monkeypatch, capsys,
                                                   tmp_path):
    """Named, it is an error: no answer is not "not applicable"."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="py-spy dump is not installed; fix: "):
        choose_installed(["py-spy dump"])
    with pytest.raises(UserError, match="TrainCheck is not installed; fix: "):
        command.run(["--tool", "TrainCheck", CASE.name])
    names = [tool.name for tool in choose_installed([])]
    assert "rankcheck" in names and "py-spy dump" not in names
    assert "py-spy dump is left out" in capsys.readouterr().err


def test_what_is_not_installed_has_no_version():
    """Or merging would replace the version of an earlier run with none."""
    versions = results.describe_versions({"a": "1", "spmd_types": ""})
    assert versions["a"] == "1" and "spmd_types" not in versions


class Failing(tools.Tool):
    """Cannot be run."""

    name = "failing"

    def why_not(self, case):
        return ""

    def ask(self, case, twin):
        raise UserError("no such program")


def test_a_tool_that_cannot_be_run_has_missed():
    row = asking.try_case(Failing(), CASES[0])
    assert (row.score, row.reason) == (
        "missed", "could not be run: no such program")


def test_cases_of_both_groups_take_turns():
    groups = [case.group for case in asking.take_turns(CASES)]
    for part in range(4):
        some = groups[part * len(groups) // 4:][:len(groups) // 4]
        assert set(some) == {SILENT, HANG}
    assert sorted(groups) == sorted(case.group for case in CASES)


@pytest.mark.table
def test_the_loss_curve_is_noticed_by_its_own_rule():
    curve = tools.LossCurve()
    case = next(case for case in CASES if case.name == "sharded-twice")
    found = score(case, curve.ask(case, "wrong"), curve.ask(case, "right"))
    assert found.score is Score.NOTICED, found


# ------------------------------------------------------------- the command


def make_row(case, tool, value, **more):
    return ResultRow(
        case.name, case.group, case.kind, case.held_out, tool, value, "",
        False, more.pop("warnings", 0), 1.0, more.pop("wrong", []), [])


def make_results():
    rows = [make_row(CASE, "a", "named", wrong=[NAMES], warnings=2),
            make_row(CASE, "b", "not applicable")]
    return Results("2026-11-29T00:00:00+00:00", {"a": "1"}, 2, 3.0, 4.0, rows)


def test_results_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "results.json"
    results.write(make_results(), file)
    assert results.read(file) == make_results()
    assert json.loads(file.read_text())["schema"] == results.RESULTS_SCHEMA
    file.write_text("{}")
    with pytest.raises(UserError, match="has no results of the bench"):
        results.read(file)


def test_the_tables():
    table = results.make_table(make_results())
    assert ("| a, silent errors | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 of 0 | 2 |"
            in table)
    assert ("| b, silent errors | 1 | 0 | 0 | 0 | 0 | 0 | 1 | 0 of 0 | 0 |"
            in table)
    assert "| data | 1 | 1 named |" in table


def test_results_are_scored_again(tmp_path, capsys):
    """With the registry's present words."""
    old = make_results()
    old.rows[0] = make_row(CASE, "a", "missed", wrong=[NAMES])
    file = tmp_path / "results.json"
    results.write(old, file)
    assert command.run(["--table", str(file)]) == 0
    assert "| a, silent errors | 1 | 1 |" in capsys.readouterr().out


def test_the_last_of_several_answers_counts():
    first = make_results()
    again = Results("2026-11-30T00:00:00+00:00", {"b": "2"}, 2, 4.0, 5.0,
                    [make_row(CASE, "a", "named")])
    merged = command.merge([first, again], CASES)
    assert [row.score for row in merged.rows] == ["missed", "not applicable"]
    assert merged.versions == {"a": "1", "b": "2"} and merged.seconds == 7.0
    assert merged.cpu_seconds == 9.0
    slow = Results(again.date, {}, 2, 4000.0, 5000.0,
                   [make_row(CASE, "TrainCheck", "noticed")])
    merged = command.merge([first, slow], CASES)  # a run leaves it out
    assert len(merged.rows) == 3 and merged.seconds == first.seconds


def test_the_page_shows_the_results_that_are_kept():
    """Scored by the registry's present words; the picture as well."""
    found = results.read(FOLDER / page.RESULTS)
    assert command.merge([found], CASES).rows == found.rows
    assert found.date and found.versions["torch"]
    text = (HOUSE / "docs" / "bench.md").read_text("utf-8")
    assert page.make_page(text, found) == text
    picture = (HOUSE / "docs" / "bench.svg").read_text("utf-8")
    assert page.make_picture(found) == picture


def test_the_page_is_written_between_its_marks():
    text = ("before\n<!-- table of results -->\nold\n<!-- end -->\n"
            "<!-- run of results -->\n<!-- end -->\nafter\n")
    found = make_results()
    written = page.make_page(text, found)
    assert written.startswith("before\n<!-- table") and "old" not in written
    assert "| a, silent errors | 1 | 1 |" in written
    assert "Measured on 2026-11-29, on 2 cores" in written
    assert written.endswith("<!-- end -->\nafter\n")
    assert page.make_page(written, found) == written


def test_the_page_sums_up_what_rankcheck_has_named():
    hang = next(case for case in CASES if case.group == HANG)
    found = make_results()
    found.rows.append(make_row(CASE, "rankcheck", "named"))
    for value in "false", "named":
        row = make_row(hang, "rankcheck", value)
        found.rows.append(replace(row, held_out=value == "named"))
    text = "<!-- summary of results -->\n<!-- end -->\n"
    assert (
        "rankcheck named 1 of 1 silent errors and 1 of 2 hangs and deaths (of "
        "the held-out cases, which were never used while rankcheck was "
        "changed: 0 of 0 and 1 of 1), and gave 1 false answer.\n"
        in page.make_page(text, found))


def test_the_picture_has_a_bar_for_each_tool_that_applies():
    picture = page.make_picture(make_results())
    assert ">silent errors (1)<" in picture
    assert ">a<" in picture and ">b<" not in picture
    assert page.COLOURS[Score.NAMED] in picture
    assert "prefers-color-scheme: dark" in picture


def test_the_cases_are_listed(capsys):
    assert command.run(["--list", "RNG"]) == 0
    out = capsys.readouterr().out
    assert "noise-alike: RNG, Robbyant/lingbot-vla-v2#41." in out


def test_a_list_of_which_only_the_head_is_read():
    """It says nothing more, as `rankcheck` does."""
    listing = subprocess.Popen(
        [sys.executable, "-m", "rankcheck.bench", "--list"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(HOUSE / "src")})
    listing.stdout.close()
    assert listing.wait(60) == 2
    assert listing.stderr.read() == ""
    listing.stderr.close()


@pytest.mark.parametrize(("words", "says"), [
    (["--tool", "magic"], "there is no tool magic"),
    (["--jobs", "0"], "--jobs is 1 or more"),
    (["--cases", "nowhere"], "nowhere has no registry"),
    (["colours"], "no case is called colours"),
    (["--tool", "spmd_types", "--json", "/nowhere/results.json"],
     "results.json cannot be written: No such file")])
def test_an_error_is_one_line(words, says):
    with pytest.raises(UserError, match=says) as error:
        command.run(words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("error", "status"), [
    (KeyboardInterrupt(), 130), (RuntimeError("a bug of ours"), 2)])
def test_what_was_answered_before_an_end_is_kept(
        error, status, tmp_path, monkeypatch):
    file = tmp_path / "results.json"

    def try_out(tools, cases, jobs):
        yield make_row(CASE, "spmd_types", "not applicable")
        raise error

    monkeypatch.setattr(command, "try_out", try_out)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [
        "bench", "--tool", "spmd_types", "--json", str(file)])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == status
    assert [row.case for row in results.read(file).rows] == [CASE.name]


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_no_folder_and_no_process(
        number, tmp_path):
    """In the middle of a verify, whose own handler leaves at once."""
    bench = subprocess.Popen(
        [sys.executable, "-m", "rankcheck.bench", "--tool", "rankcheck",
         "--jobs", "2", "data"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path),
             "PYTHONPATH": str(HOUSE / "src")},
        # a suite in the background ignores Ctrl-C, and so would this
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL))
    wait_for(lambda: len([*tmp_path.glob("bench-*/bench-*/train.py")]) == 2,
             120)
    workers = tools.processes_with(f"TMPDIR={tmp_path}")
    assert len(workers) > 2
    bench.send_signal(number)
    assert "interrupted" in bench.communicate(timeout=60)[1]
    assert bench.returncode == 130
    wait_for(lambda: not tools.processes_with(f"TMPDIR={tmp_path}"), 30)
    assert not [*tmp_path.glob("bench-*")]


SAMPLES_OF_ITS_OWN = """\
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.whole
def test_what_verify_says_does_not_stand_between_the_rows(tmp_path, capfd):
    """Also where nothing was compared: the bench reads its document."""
    (tmp_path / "train.py").write_text(SAMPLES_OF_ITS_OWN)
    output = tools.run_here(["verify", "--json", "train.py"], tmp_path)
    document = json.loads(output)
    assert document["error"].startswith("not verified: nothing was compared")
    assert capfd.readouterr() == ("", "")


@pytest.mark.whole
def test_rankcheck_is_asked_by_its_commands(tmp_path):
    """About a silent error and about a death, and both right twins."""
    file = tmp_path / "results.json"
    end = python(tmp_path, "-m", "rankcheck.bench", "--tool", "rankcheck",
                 "--json", file, "divided-by-world-size", "killed-for-memory",
                 PYTHONPATH=str(HOUSE / "src"))
    assert end.returncode == 0, end.stderr
    found = results.read(file)
    assert [row.score for row in found.rows] == ["named", "named"], found
    assert found.versions["rankcheck"] and found.cores
