"""Build a virtual environment where nobody uses it yet, and put it in place.

    python environment/build.py VENV KEEP SYSTEM NAME=VALUE...

KEEP: "yes" to begin with a copy of the packages that are there. SYSTEM: "" or
an option of Python's venv. The rest goes into the marker of the environment,
which says of what it was made, and by which clone. Only what this clone has
made is ever deleted. setup.sh runs this, from the clone, and holds the lock.
"""

import ast
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

MARKER = "workshop-base"
OWN = {MARKER, "install.log", "site-torch.txt"}  # each environment's own
# What venv and pip fill: another Python needs all of it anew.
PARTS = {"bin", "etc", "include", "lib", "lib64", "share", "pyvenv.cfg"}
# The ends of pip's settings that say which packages to take, and from where.
# Any other, such as prefix, user or dry-run, could send them elsewhere.
KEPT = ("binary", "cache-dir", "cert", "constraint", "find-links", "index",
        "index-url", "keyring-provider", "proxy", "retries", "timeout",
        "trusted-host", "use-deprecated", "use-feature")


def fail(*words):
    sys.exit(" ".join(["activate.sh:", *map(str, words)]))


def made_here(folder):
    """Whether this clone has made it, or has come with it from elsewhere."""
    marker, clone = folder / MARKER, Path.cwd()
    if folder.is_symlink() or not marker.is_file():
        return False
    fields = dict(line.partition("=")[::2] for line in os.fsdecode(
        marker.read_bytes()).splitlines())
    by, place = fields.get("clone", ""), fields.get("place", "")
    if os.path.exists(by) and clone.samefile(by):
        return True
    return (folder.parent == clone and folder.name.startswith(".venv")
            and not (os.path.exists(by) and Path(place).parent == clone))


def discard(folder, new):
    """Delete what an earlier attempt has left.

    It gets the name of an unfinished one first: setup.sh takes what is called
    old for whole.
    """
    with suppress(OSError):
        folder.rmdir()
    if made_here(folder):
        if not locked():
            fail(f"{folder} is another shell's, or was left by one: remove it",
                 "if no other shell is setting this up")
        folder.rename(new)
        remove(new)
    elif os.path.lexists(folder):
        fail(f"{folder} is in the way, and this clone has not made it:",
             "remove it if nobody needs it")


def locked():
    """Whether setup.sh holds its lock: the others have then ended."""
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # this file system has no locks
        return False
    return True


def remove(folder):
    """Delete it, its marker last: another attempt has to know it again."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    (folder / MARKER).unlink(missing_ok=True)
    folder.rmdir()


def mark(folder, *lines):
    new = folder / f"{MARKER}~"
    new.write_bytes(os.fsencode("\n".join([*lines, ""])))
    new.replace(folder / MARKER)


def link(source, target):
    """Pip never writes into a file that exists, so both may be the same."""
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):  # a file system without hard links
        try:
            shutil.copy2(source, target, follow_symlinks=False)
        except OSError as error:  # copytree would go on
            fail("cannot copy the environment:", error)


def copy(old, new, without):
    """Copy the folder, but for some names in it. It takes little space."""
    with suppress(PermissionError):
        os.chown(new, -1, old.stat().st_gid)
    shutil.copystat(old, new)
    shutil.copytree(
        old, new, symlinks=True, dirs_exist_ok=True, copy_function=link,
        ignore=lambda folder, names: without if Path(folder) == old else ())


def make(new, system):
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--prompt", "workshop",
         *filter(None, [system]), new], close_fds=False, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if made.returncode:
        fail(f"{sys.executable} cannot make a virtual environment (on Debian",
             "and Ubuntu: apt install python3-venv):",
             *made.stdout.splitlines()[-1:])


def told(python, env):
    """The settings in KEPT, from pip's variables and files, as variables."""
    listed = subprocess.run(  # -vvv: it may have been told to be quiet
        [python, "-m", "pip", "config", "list", "-vvv"], env=env,
        capture_output=True, text=True, check=False)
    if listed.returncode:
        fail("pip cannot read its settings:",
             *listed.stderr.splitlines()[-1:])
    found = {}
    for section in "global", "install", ":env:":  # the later ones win
        for name, value in re.findall(
                rf"(?m)^{section}\.(\S+?)=(.+)", listed.stdout):
            if name.endswith(KEPT) and (value := ast.literal_eval(value)):
                found["PIP_" + name.upper().replace("-", "_")] = value
    return found


def reason(lines):
    """The line of pip's that says most; a traceback has it at its end."""
    said, *after = lines[next((number for number, line in enumerate(lines)
                               if "ERROR" in line), -1):]
    if after and after[0].startswith("Traceback"):
        said = next((line for line in reversed(after)
                     if re.match(r"[\w.]*[a-z]\w*(: |$)", line)), said)
    return said.strip()


def install(new, system):
    python, pins = new / "bin/python", "environment/constraints.txt"
    if system:
        found = subprocess.run(
            [python, "-c", "from importlib.metadata import version\n"
             "print('torch==' + version('torch'))"],
            capture_output=True, text=True, check=False)
        if found.returncode:
            fail("the site's Python has no PyTorch: load its module in",
                 "site.sh")
        pins = new / "site-torch.txt"
        pins.write_text(found.stdout)
    print("activate.sh: installing requirements.txt (takes minutes the first "
          "time)", flush=True)
    env = {name: value for name, value in os.environ.items()
           if name != "PIP_PYTHON" and (system or name != "PYTHONPATH")}
    kept = told(python, env)
    env = {name: value for name, value in env.items()
           if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PYTHONUNBUFFERED": "1"}
    # the second time, without a source, it finds out whether all is here
    lines = [""]
    for words, more in ([["-v", "-e", "."], kept], [["--no-index"], {}]):
        with subprocess.Popen(
                [python, "-m", "pip", "install", "--no-input",
                 "--disable-pip-version-check", "-c", pins, *words, "-r",
                 "requirements.txt", "-r", "tests/requirements.txt"],
                env=env | more, close_fds=False, text=True, errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as pip:
            for line in pip.stdout:
                lines.append(line)
                if re.match(r"\s*(Downloading|WARNING: Retrying)", line):
                    print(re.sub(r" \(Retry\(.*?\)\)|<.*?>: ", "", line),
                          end="", flush=True)
        if pip.returncode:
            break
    log = new / "install.log"
    if pip.returncode:
        log = Path(tempfile.mkdtemp(prefix="workshop-")) / "install.log"
    log.write_text("".join(lines))
    if pip.returncode:
        what = "pip failed" if "-e" in words else (
            "pip has put packages elsewhere, or has left some out")
        fail(f"{what} ({reason(lines)}): if it does not reach the network,",
             f"name a mirror in site.sh; full log: {log}")


def check_torch(python):
    """Say so if PyTorch is there, but cannot be loaded."""
    ran = subprocess.run(
        [python, "-c", "import importlib.util\n"
         "if importlib.util.find_spec('torch'): import torch"],
        capture_output=True, text=True, errors="replace", check=False)
    if ran.returncode:
        said = ran.stderr.splitlines()[-1:] or [f"status {ran.returncode}"]
        print("activate.sh: PyTorch is installed, but cannot be loaded here",
              f"({said[0]}): a module in site.sh may be missing, or one too",
              "many", file=sys.stderr)


def correct(folder, old, new):
    """Replace a path, or a part of it, in an environment's own files."""
    old, new, files = os.fsencode(old), os.fsencode(new), []
    for name in "bin", "etc", "share":
        files += Path(folder, name).rglob("*")
    for path in (*files, Path(folder, "pyvenv.cfg"), Path(folder, MARKER)):
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes()
            if old in text:
                other = path.with_name(f"{path.name}.workshop-new")
                with other.open("xb") as file:  # nobody else's
                    file.write(text.replace(old, new))
                shutil.copymode(path, other)
                other.replace(path)


def place(new, venv, old):
    """Correct its path in its files, and rename it.

    What the two paths differ in is nowhere else in these files.
    """
    correct(new, str(new)[len(str(venv)):], "")
    if new.parent == venv:
        # no Python before the packages, and the marker when it is whole
        names = {path.name for path in new.iterdir()} - {"bin", MARKER}
        for name in [*names, "bin", MARKER]:
            (new / name).rename(venv / name)
    elif not venv.exists():
        new.rename(venv)
    else:
        venv.rename(old)
        try:
            new.rename(venv)
        except OSError:
            old.rename(venv)
            raise


def main(venv, keep, system, *fields):
    venv, maker = Path(venv), [f"clone={Path.cwd()}", f"place={venv}"]
    new, old = (venv.with_name(f"{venv.name}.workshop-{which}")
                for which in ("new", "old"))
    filled = venv.exists() and not all(
        path.name.startswith(".workshop-") for path in venv.iterdir())
    if venv.exists() and not filled:
        new = venv / ".workshop-new"  # it can be a mount: it has to stay
    elif venv.is_mount() or not os.access(venv.parent, os.W_OK):
        fail(f"{venv} cannot be changed, since it is a mount or {venv.parent}",
             "is not writable: empty it, or name another folder in site.sh")
    discard(new, new)
    if filled:
        discard(old, new)
    new.mkdir()  # from here on, it is this clone's
    try:
        mark(new, *maker)
        if filled:
            copy(venv, new, OWN if keep else OWN | PARTS)
        if not keep:
            make(new, system)
        install(new, system)
        check_torch(new / "bin/python")
        mark(new, *maker, *fields)
        place(new, venv, old)
        if made_here(old):
            old.rename(new)
        elif filled:
            print(f"activate.sh: {old} is the previous environment, made by",
                  "another clone: remove it if nobody needs it")
    finally:
        with suppress(OSError):  # NFS keeps what is in use: the next time
            remove(new)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        fail("interrupted")
    except OSError as error:
        fail(f"cannot set up {sys.argv[1]}:", str(error)[:300])
