"""Where a command writes, a file of the user's stays as it is.

Training has tests of its own, as have verify, check, apply and reset.
"""

import re

import pytest

from backstage import ROOT
from rankcheck.launch.ranks import launch

RUN = ROOT / "example-logs" / "std-1"
COMMANDS = [  # what it is told, and the file that it would write, in {out}
    ("fineweb/splitfineweb.py {data} --parts 2 --out {out}",
     "{out}/test_train_000001.npy"),
    (f"fineweb/demo.py {ROOT}/README.md --out {{out}}",
     "{out}/demo_train_000001.npy"),
    ("code/huggingface.py export {run} {out}", "{out}/config.json"),
    ("code/huggingface.py export {run} {out}", "{out}/model.safetensors"),
    ("code/huggingface.py import {run} {out}/mine.pt", "{out}/mine.pt"),
    *((f"-m workshop plot {RUN} -o {{out}}/a.{kind}", f"{{out}}/a.{kind}")
      for kind in ("png", "svg", "pdf")),
    ("-m workshop class {out}/class -o {out}/mine.html", "{out}/mine.html"),
]


@pytest.mark.whole
@pytest.mark.parametrize("words, place", COMMANDS)
def test_a_file_that_is_there_stays(words, place, data, single, tmp_path):
    names = {"out": tmp_path / "out", "data": data, "run": single.folder}
    file = tmp_path / place.format(**names)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    script, *flags = words.format(**names).split()
    module = flags.pop(0) if script == "-m" else ""
    end, = launch(ROOT / script, *flags, module=module,
                  place=ROOT if module else None)
    assert file.read_text() == "mine"
    assert end.status and re.search("^error: ", end.err, re.M), end
    assert "Traceback" not in end.err
