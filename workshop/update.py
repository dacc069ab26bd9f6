"""Bring this clone to the state of the repository that it came from.

Nothing is lost: files with edits, and notebooks with outputs, are first moved
out of the way, to names with the date in them. The desk's script stays as it
is, with a backup. Only the standard library, from Python 3.9 on.
"""

import json
import os
import subprocess
import time
from pathlib import Path

from backstage import ROOT
from backstage.errors import UserError, require
from backstage.files import (
    dated_names,
    locked,
    show_path,
    write_atomically,
)
from workshop.lesson import desk
from workshop.stages import DESK


def main():
    """`python -m workshop update`; raises `UserError` if it cannot be done."""
    require(says("rev-parse", "--git-dir"), "this is not a git clone: get one "
            "with `git clone`, and copy your code/train_gpt2.py into it")
    source = says("rev-parse", "--abbrev-ref", "@{upstream}")
    require(source, "git does not know where this clone's branch comes from: "
            "`git switch main`, or `git branch --set-upstream-to origin/main`")
    require(not names("diff", "--name-only", "--diff-filter=U"), "a merge is "
            "not finished here: `git merge --abort` goes back")
    run("fetch", "--quiet", source.split("/")[0])
    before, now = run("rev-parse", "HEAD"), time.strftime("%Y%m%d-%H%M%S")
    if commits := run("rev-list", f"{source}..HEAD").split():
        run("branch", f"mine-{now}")
        print(f"your commits ({len(commits)}) are in the branch mine-{now}")
    with locked(DESK):
        script = edited_script(source)
        backup = desk.back_up() if script is not None else None
        for path in in_the_way(source):
            kept = next(name for name in dated_names(path)
                        if not os.path.lexists(name))
            path.rename(kept)
            print(f"your {show_path(path)} is {show_path(kept)} now")
        try:
            run("reset", "--quiet", "--hard", source)
        finally:
            if script is not None:
                write_atomically(DESK, script)
    if script is not None:
        print(f"your {show_path(DESK)} is as it was; a copy is "
              f"{show_path(backup)}")
    say_news(before, source)


def edited_script(source):
    """The bytes of the desk's script if they are the attendee's, else None."""
    name = str(DESK.relative_to(ROOT))
    common = says("merge-base", "HEAD", source)
    if not DESK.exists() or (
            common and not names("diff", "--name-only", common, "--", name)):
        return None
    return DESK.read_bytes()


def in_the_way(source):
    """What holds something of the attendee's, the desk's script apart."""
    tracked = names("ls-files")
    found = names("diff", "--name-only", "HEAD")
    found |= {name for name in tracked
              if name.endswith(".ipynb") and has_outputs(ROOT / name)}
    found.discard(str(DESK.relative_to(ROOT)))
    for name in names("ls-tree", "-r", "--name-only", source) - tracked:
        found.add(name)  # the attendee's may have a new file's name,
        found |= {str(folder) for folder in Path(name).parents[:-1]
                  if (ROOT / folder).is_file()}  # or that of its folder
    return [ROOT / name for name in sorted(found)
            if os.path.lexists(ROOT / name)]


def has_outputs(path):
    """Whether a notebook has outputs, or cannot be read."""
    try:
        return any(cell.get("outputs")
                   for cell in json.loads(path.read_bytes())["cells"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return True


def say_news(before, source):
    """Print what has come, and what to do with it."""
    newest = run("log", "-1", "--format=%h of %cs, %s")
    changed = names("diff", "--name-only", before, "HEAD")
    print(f"this clone is {source} now: {newest}; {len(changed)} files have "
          "changed" if changed else f"nothing new: {source} is {newest}")
    if changed:
        print("Close and reopen those that are open in an editor, then run "
              "`source activate.sh` in your terminals.")


# ---------------------------------------------------------------------- git


def call(*arguments):
    # it must not ask for a password: there may be no terminal
    env = os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], env=env, check=False,
            stdin=subprocess.DEVNULL, capture_output=True)
    except FileNotFoundError as error:
        raise UserError("there is no git here: load your site's module, or "
                        "install it") from error


def run(*arguments):
    """What git prints; raises a `UserError` if it fails."""
    done = call(*arguments)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    require(done.returncode == 0, f"git {arguments[0]} failed "
            f"({said[0] if said else 'no message'}): nothing is lost; settle "
            "this, then try again")
    return os.fsdecode(done.stdout).strip()


def says(*arguments):
    """What git prints, or "" if it fails."""
    done = call(*arguments)
    return "" if done.returncode else os.fsdecode(done.stdout).strip()


def names(command, *arguments):
    """The set of file names that git prints, whatever their characters."""
    return set(run(command, "-z", *arguments).split("\0")) - {""}
