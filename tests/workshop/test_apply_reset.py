"""python -m workshop apply and reset, in a repository of their own."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import copy_clone, edit, python, workshop

from backstage import ROOT
from rankcheck_testing.planted import load
from workshop.diff import documents

TITLES = [change.title for change in documents.load_changes("ddp")]
N = len(TITLES)
WRAP = str(1 + TITLES.index("Wrap the model in DDP"))
BACKUP = r"20\d{6}-\d{6}-\d+(\.apply-ddp(-\d+)+)?\.py"


@pytest.fixture
def repo(tmp_path):
    return copy_clone(tmp_path)


def script(repo):
    return repo / "code" / "train_gpt2.py"


def solution(repo, stage):
    return (repo / "solutions" / f"train_gpt2_{stage}.py").read_bytes()


def backups(repo):
    """In their order; and nothing half written lies about."""
    folder = repo / "code" / "backups"
    assert {*(repo / "code").iterdir()} <= {
        script(repo), folder, repo / "code" / ".checked.json",
        repo / "code" / ".originals.json"}
    files = [path for path in folder.glob("*") if path.name != ".lock"]
    assert all(re.fullmatch(BACKUP, file.name) for file in files)
    return sorted(files, key=lambda file: int(number(file)))


def date(backup):
    return backup.name.split(".")[0]


def number(backup):
    return date(backup).split("-")[2]


def test_apply_makes_one_change_and_keeps_what_was_there(repo):
    out = workshop(repo, "apply", "ddp", WRAP)
    assert f"made change {WRAP}: Wrap the model in DDP\n" in out
    assert f"{N - 1} of {N} changes left" in out
    assert out.splitlines()[-1].startswith("Reopen")
    assert b"\n    model = DistributedDataParallel(" in script(
        repo).read_bytes()
    backup, = backups(repo)
    assert backup.read_bytes() == solution(repo, "std")
    assert str(backup.relative_to(repo)) in out
    out = workshop(repo, "apply", "ddp", WRAP)
    assert "already made" in out and backups(repo) == [backup]


def test_apply_all_makes_the_solution_and_keeps_own_lines(repo):
    workshop(repo, "apply", "ddp", "3", "1")
    assert "replaced:" not in workshop(repo, "apply", "ddp", "--all")
    assert script(repo).read_bytes() == solution(repo, "ddp")
    assert len(backups(repo)) == 2
    own = solution(repo, "std").replace(
        b"import math\n", b"import math\nprint('mine')\n")
    script(repo).write_bytes(own)
    out = workshop(repo, "apply", "ddp", "--all")
    assert f"0 of {N} changes left" in out and "Other differences" in out
    text = script(repo).read_bytes()
    assert text.replace(b"print('mine')\n", b"") == solution(repo, "ddp")
    assert own in [file.read_bytes() for file in backups(repo)]


def test_apply_leaves_alone_what_it_would_break(repo):
    head, body = solution(repo, "std").decode().split("def main():\n")
    body, tail = body.split("\n\nif __name__")
    body = "\n".join(f"    {line}" if line else "" for line in
                     body.split("\n"))
    mine = (f"{head}def main():\n    try:\n{body}\n    finally:\n"
            f"        print('bye')\n\n\nif __name__{tail}").encode()
    compile(mine, "mine", "exec")
    script(repo).write_bytes(mine)
    assert "conflicts with your edits" in workshop(
        repo, "apply", "ddp", WRAP, status=1)
    assert script(repo).read_bytes() == mine and not backups(repo)
    somewhere_else = 1 + TITLES.index("Begin at this rank's own samples")
    workshop(repo, "apply", "ddp", str(somewhere_else))


@pytest.mark.parametrize("words", [("1", "3"), ("--all",)])
def test_apply_leaves_another_stage_alone(repo, words):
    """The lesson's lines would make it neither of the two."""
    assert "the stage std, but the lesson starts from ddp" in workshop(
        repo, "apply", "lit", *words, status=1)
    assert script(repo).read_bytes() == solution(repo, "std")
    assert not backups(repo)


def test_apply_keeps_a_syntax_error_line_ends_and_permissions(repo):
    for old, new in ((b"class MLP(nn.Module):", b"class MLP(nn.Module:"),
                     (b"\n", b"\r\n")):
        script(repo).write_bytes(solution(repo, "std").replace(old, new))
        script(repo).chmod(0o640)
        workshop(repo, "apply", "ddp", "--all")
        assert script(repo).read_bytes() == solution(repo, "ddp").replace(
            old, new)
        assert script(repo).stat().st_mode & 0o777 == 0o640


def test_reset_undo_and_back_by_date(repo):
    mine = solution(repo, "std") + b"print(1)\n"
    script(repo).write_bytes(mine)
    out = workshop(repo, "reset", "ddp")
    assert script(repo).read_bytes() == solution(repo, "ddp")
    first, = backups(repo)
    assert first.read_bytes() == mine
    assert out.splitlines()[-1].startswith("Reopen")
    listed = workshop(repo, "reset", "--list")
    assert re.search(r"^code/train_gpt2\.py +ddp$", listed, re.MULTILINE)
    assert re.search(rf"^{date(first)} +std, with 1 lines? of "
                     "code changed$", listed, re.MULTILINE)
    assert "already ddp" in workshop(repo, "reset", "ddp")
    assert backups(repo) == [first]
    workshop(repo, "reset", "--undo")
    assert script(repo).read_bytes() == mine
    workshop(repo, "reset", "--undo")  # and forth
    assert script(repo).read_bytes() == solution(repo, "ddp")
    workshop(repo, "reset", "std")
    workshop(repo, "reset", date(first))
    assert script(repo).read_bytes() == mine
    assert mine in [file.read_bytes() for file in backups(repo)]


def on_sync(call, moment, then):
    """Run `call`, and `then` just before it syncs for the moment-th time."""
    return f"""if True:
        import os, pathlib
        from backstage.errors import run_main
        from workshop.diff import working_copy
        script, sync, times = working_copy.WORKING_COPY, os.fsync, []

        def fsync(file):
            times.append(file)
            if len(times) == {moment}:
                {then}
            sync(file)

        os.fsync = fsync
        run_main(lambda: working_copy.{call})"""


@pytest.mark.whole
@pytest.mark.parametrize("call", [
    "apply_changes('ddp', [3])", "reset_to('ddp')"])
@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("moment", [1, 2, 3])
def test_what_an_editor_saves_meanwhile_stays(repo, call, links, moment):
    """While a slow disk writes the backup, its folder, or the new script."""
    if links == 2:
        os.link(script(repo), repo / "another")
    end = python(repo, "-c", on_sync(
        call, moment, "script.write_text('# saved meanwhile\\n')"))
    if links == 2 and moment == 3:  # the new script was there before
        assert end.returncode == 0
    else:
        assert end.returncode == 1
        assert re.fullmatch(r"error: [^\n]+ was saved meanwhile [^\n]+\n",
                            end.stderr), end.stderr
        assert not backups(repo)
    assert script(repo).read_text() == "# saved meanwhile\n"


def test_the_backup_is_on_the_disk_before_the_script_is_replaced(repo):
    """After a power cut an empty one could be all that is left."""
    for moment in 1, 2, 3:
        python(repo, "-c", on_sync("reset_to('ddp')", moment, "os._exit(1)"))
        assert script(repo).read_bytes() == solution(repo, "std")
    for backup in (repo / "code" / "backups").glob("*.py"):
        assert backup.read_bytes() == solution(repo, "std")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_stays_one_and_a_full_disk_leaves_what_was_there(repo, link):
    mine = repo / "mine" / "training.py"
    mine.parent.mkdir()
    script(repo).rename(mine)
    link(mine, script(repo))
    workshop(repo, "reset", "lit")
    assert mine.read_bytes() == solution(repo, "lit")
    assert script(repo).samefile(mine)
    workshop(repo, "reset", "--undo")
    assert mine.read_bytes() == solution(repo, "std")
    assert script(repo).is_symlink() == (link is os.symlink)
    before = backups(repo)
    end = python(repo, "-c", on_sync("reset_to('3d')", 2, (
        "import resource, signal; signal.signal(signal.SIGXFSZ, "
        "signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, "
        "2 * [script.stat().st_size + 99])")))
    assert re.fullmatch(r"error: [^\n]+ is unchanged[^\n]*\n", end.stderr)
    assert mine.read_bytes() == solution(repo, "std")
    assert backups(repo) == before


def test_a_link_to_a_solution_does_not_change_that(repo):
    script(repo).unlink()
    script(repo).symlink_to("../solutions/train_gpt2_std.py")
    assert "`rm code/train_gpt2.py`" in workshop(
        repo, "apply", "ddp", "1", status=1)


@pytest.mark.whole
def test_undo_goes_by_the_order_and_not_by_a_clock(repo):
    """Nor do time zones, resets within a second, and backups from before they
    had numbers, matter.
    """
    (repo / "code" / "train_gpt2.20990101-000001.py").write_text("# old 1\n")
    (repo / "code" / "train_gpt2.20990101-000001-2.py").write_text("# old 2")
    for version, zone in enumerate(("Asia/Tokyo", "UTC", "America/Lima")):
        script(repo).write_text(f"# version {version}\n")
        workshop(repo, "reset", "std", TZ=zone)
    assert {file.read_text() for file in repo.glob("code/backups/*.py")} == {
        f"# version {version}\n" for version in range(3)}
    names = [line.split()[0] for line in workshop(
        repo, "reset", "--list").splitlines()[2:-1]]
    assert names[:2] == ["20990101-000001", "20990101-000001-2"]
    assert [name.split("-")[2] for name in names[2:]] == ["1", "2", "3"]
    workshop(repo, "reset", "--undo", TZ="America/Lima")
    assert script(repo).read_text() == "# version 2\n"
    shutil.rmtree(repo / "code" / "backups")
    workshop(repo, "reset", "--undo")
    assert script(repo).read_text() == "# old 2"


@pytest.mark.whole
def test_applies_at_the_same_time_lose_no_change(repo):
    numbers = range(1, N + 1, 2)
    together = [subprocess.Popen(
        [sys.executable, "-m", "workshop", "apply", "ddp", str(number)],
        cwd=repo, stdout=subprocess.DEVNULL) for number in numbers]
    assert not any(process.wait() for process in together)
    assert f"{N - len(numbers)} of {N} changes left" in workshop(
        repo, "diff", "ddp")


@pytest.mark.whole
def test_the_list_says_what_an_editor_has_saved_over(repo):
    text = script(repo).read_text()
    workshop(repo, "apply", "ddp", "1", "2")
    workshop(repo, "apply", "ddp", WRAP)
    assert "no longer has" not in workshop(repo, "diff", "ddp")
    # a change that is edited afterwards is not gone
    made = script(repo).read_text()
    script(repo).write_text(edit(made, ("gradient_as_bucket_view=True", "")))
    assert "no longer has" not in workshop(repo, "diff", "ddp")
    # JupyterLab's Overwrite, of what the editor shows and an edit in it
    script(repo).write_text(edit(text, ("device = use_device(hp.device)",
                                        "device = use_device('cpu')")))
    said = workshop(repo, "diff", "ddp")
    assert f"changes 1 2 {WRAP}, but the script no longer has" in said
    again, = re.findall(r"`python -m workshop (apply [^`]+)`", said)
    workshop(repo, *again.split())
    assert "no longer has" not in workshop(repo, "diff", "ddp")
    workshop(repo, "reset", "--undo")  # by which they go, too
    assert "no longer has" not in workshop(repo, "diff", "ddp")


def test_apply_says_which_lines_of_ones_own_gave_way(repo):
    text = edit(solution(repo, "std").decode(),
                ("            loss = loss / accumulation_steps\n",
                 "            print('mine', loss)\n"
                 "            loss = loss / accumulation_steps\n"))
    script(repo).write_text(text)
    out = workshop(repo, "apply", "ddp", "--all")
    assert "print('mine', loss)" not in script(repo).read_text()
    line = text[:text.index("print('mine'")].count("\n") + 1
    assert f"Your lines that the lesson's replaced:\n  {line}             " \
        "print('mine', loss)\n" in out


def test_a_null_byte_or_no_script_is_one_line(repo):
    broken = solution(repo, "std").replace(b"class MLP", b"class\0MLP")
    line = broken[:broken.index(b"\0")].count(b"\n") + 1
    words = ("diff", "ddp"), ("apply", "ddp", "3"), ("apply", "ddp", "--all")
    script(repo).write_bytes(broken)
    for command in words:
        assert f"has a null byte in line {line}," in workshop(
            repo, *command, status=1)
    assert script(repo).read_bytes() == broken and not backups(repo)
    script(repo).unlink()
    for command in words:
        assert "reset std" in workshop(repo, *command, status=1)
    workshop(repo, "reset", "std")
    assert script(repo).read_bytes() == solution(repo, "std")


NO_FILE = {
    "FIFO": os.mkfifo, "folder": os.mkdir,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.whole
@pytest.mark.parametrize("kind", NO_FILE)
def test_what_is_no_file_is_one_line_and_nobody_waits(repo, kind, monkeypatch):
    monkeypatch.chdir(repo / "code")  # a socket's address is short
    script(repo).unlink()
    NO_FILE[kind](Path("train_gpt2.py"))
    workshop(repo, "diff", "ddp", status=1)
    if kind == "FIFO":  # all that read it ask the same function
        for words in ("check ddp", "apply ddp 3", "check ddp 3", "reset std",
                      "reset --undo"):
            workshop(repo, *words.split(), status=1)
        workshop(repo, "verify", "code/train_gpt2.py", status=2)
        for words in "reset --list", "script ddp", "launch ddp --dry-run":
            assert "cannot be read" in workshop(repo, *words.split())
    assert not script(repo).is_file()


def test_what_cannot_be_read_does_not_break_the_list(repo):
    folder = repo / "code"
    os.mkfifo(folder / "train_gpt2.20260101-000004.py")
    (folder / "train_gpt2.20260101-000001.py").write_bytes(b"a\0b\n")
    (folder / "train_gpt2.20260101-000002.py").symlink_to("nowhere")
    (folder / "train_gpt2.20260101-000003.py").write_bytes(
        solution(repo, "ddp"))
    script(repo).write_bytes(solution(repo, "std").decode().encode("utf-16"))
    lines = workshop(repo, "reset", "--list").splitlines()
    for k, (name, what) in enumerate((
            ("code/train_gpt2.py", "is not UTF-8"),
            ("20260101-000001", "null byte"),
            ("20260101-000002", "does not exist"),
            ("20260101-000003", "ddp"),
            ("20260101-000004", "not a regular file")), 1):
        assert lines[k].startswith(name) and what in lines[k]
    workshop(repo, "reset", "--undo")  # past those, to the newest
    assert script(repo).read_bytes() == solution(repo, "ddp")


def test_a_full_disk_keeps_the_script(repo):
    command = ("ulimit -f 8; trap '' XFSZ; exec "
               f"{sys.executable} -B -m workshop reset ddp")  # 8 KiB a file
    end = subprocess.run(["bash", "-c", command], cwd=repo, text=True,
                         capture_output=True)
    assert end.returncode == 1 and re.fullmatch(
        r"error: [^\n]+ is unchanged \([^\n]+\)\n", end.stderr), end.stderr
    assert script(repo).read_bytes() == solution(repo, "std")
    assert not backups(repo)


def test_a_wrong_word_is_one_line(repo):
    for words, complaint in (
            (("dif", "ddp"), "no such command: dif"),
            (("check", "std"), "invalid choice: 'std'"),
            (("apply", "ddp"), "give their numbers, or --all"),
            (("apply", "ddp", "1", "--all"), "or --all alone"),
            (("apply", "ddp", str(N + 1)), f"no such change: {N + 1}"),
            (("apply", "ddp", "x"), "invalid int value: 'x'"),
            (("diff", "ddp", "--hints", "99"), "no such change: 99"),
            (("diff", "ddp", "--hints", "7", "8"), "arguments: 8; fix: see"),
            (("launch", "ddp", "--preset", "tiny"),
             "tiny (the script's own come aft"),
            (("reset",), "stage|DATE --list --undo is required"),
            (("reset", "../../x"), "choose from std, mpi, kernels, ddp"),
            (("reset", "20200101-000000"), "reset --list"),
            (("reset", "--undo"), "nothing to undo")):
        assert complaint in workshop(repo, *words, status=1)
    assert script(repo).read_bytes() == solution(repo, "std")
    assert not backups(repo)


@pytest.mark.whole
def test_apply_all_keeps_what_the_check_has_found_right(repo):
    """Accumulation steps in words of one's own; a half of no_sync() is not
    kept: the check warns of it.
    """
    own = ("    require(S % B == 0, f\"a minibatch of {S} samples is not "
           "divisible by \"\n            f\"microbatches of {B}\")\n"
           "    accumulation_steps = S // B\n",
           "    whole_round = world_size * B\n"
           "    require(not S % whole_round, \"they do not divide\")\n"
           "    accumulation_steps = S // whole_round\n")
    workshop(repo, "apply", "ddp", *map(str, range(1, 8)))
    script(repo).write_text(edit(script(repo).read_text(), own))
    assert f"6 of {N} changes left" in workshop(repo, "diff", "ddp")
    workshop(repo, "check", "ddp", "8")
    assert f"5 of {N} changes left" in workshop(repo, "diff", "ddp")
    out = workshop(repo, "apply", "ddp", "--all")
    assert "kept change 8 as you wrote it" in out
    assert f"0 of {N} changes left" in out and "replaced:" not in out
    assert "S // whole_round" in script(repo).read_text()
    assert "all 13 changes are made" in workshop(repo, "diff", "ddp")
    # by its number, it is made all the same
    workshop(repo, "apply", "ddp", "8")
    assert script(repo).read_bytes() == solution(repo, "ddp")

    half = load(ROOT / "tests/tables/check/ddp/backward-alone-in-no_sync.diff",
                ROOT)
    script(repo).write_text(half.script())
    assert "warn" in workshop(repo, "check", "ddp", "10")
    assert f"1 of {N} changes left" in workshop(repo, "diff", "ddp")
