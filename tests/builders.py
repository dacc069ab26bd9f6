"""The tools that build datasets, as programs."""

import os
import subprocess
import sys

from backstage import ROOT

FOLDER = ROOT / "fineweb"


def start(tool, *args, **options):
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment.pop("HF_HUB_OFFLINE", None)
    environment |= options.pop("env", {})
    return subprocess.Popen(
        [sys.executable, FOLDER / f"{tool}.py", *map(str, args)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        **options)


def run(tool, *args, **options):
    """Run a tool to its end: (exit status, stdout, stderr)."""
    process = start(tool, *args, **options)
    out, err = process.communicate(timeout=400)
    return process.returncode, out, err


def refuses(result, message):
    """Whether the tool ended with one clear line that says `message`."""
    status, _, err = result
    last = err.splitlines()[-1]
    return (status == 1 and last.startswith("error: ") and message in last
            and "Traceback" not in err)


def succeeds(*args, **options):
    """Run a tool, which has to end well: (stdout, stderr)."""
    status, out, err = run(*args, **options)
    assert status == 0, err
    return out, err


def contents(folder):
    """The files in a folder, and in those inside: their names and bytes."""
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}
