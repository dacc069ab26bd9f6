"""A script that is checked changes no file that was there."""

import pytest
from stages import number_of

from rankcheck.engine import sandbox
from rankcheck_testing.user_files import TEXT, let_it_write, look
from workshop.check.command import check_script
from workshop.stages import STAGES


@pytest.mark.whole
def test_check_runs_in_it(tmp_path, monkeypatch, capsys):
    """The script and what is beside it, in a folder with its real output.

    What another program changes it cannot keep: it says so.
    """
    (tmp_path / "out").mkdir()
    for name in "log1", "log3", "out/log2":
        (tmp_path / name).write_bytes(TEXT)
    large = tmp_path / "out/large3"
    large.write_bytes(TEXT * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox, "SMALL", 20_000)
    script = tmp_path / "train.py"
    script.write_text(let_it_write(STAGES["std"].solution.read_text(),
                                   "; os.system('echo >> out/large3')"))
    before = look(tmp_path)
    assert check_script("ddp", script,
                        change=number_of("ddp", "Reduce the gradients")).ok
    after = look(tmp_path)
    assert [path for path in before if after[path] != before[path]] == [large]
    assert ("warning: out/large3 changed meanwhile, by another program, or by "
            "one that the script") in " ".join(capsys.readouterr().out.split())
