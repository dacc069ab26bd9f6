"""Bring this clone to the state of the repository that it came from.

Nothing is lost: files with edits, and notebooks with outputs, that the newest
course has changed are first moved out of the way, to names with the date in
them. All others stay. Git itself refuses to overwrite an edit that was not
moved. The desk's script stays as it is, with a backup. Only the standard
library, from Python 3.9 on.
"""

import itertools
import json
import os
import time
from pathlib import Path

from backstage import ROOT
from backstage.errors import require
from backstage.files import show_path
from workshop.jobs import git
from workshop.lesson.backups import FOLDER, back_up, locked_desk, read_script
from workshop.stages import DESK

DESK_NAME = str(DESK.relative_to(ROOT))
ASIDE = FOLDER / "aside"  # the desk's script while git renews the others


def add_arguments(parser):
    """It has none."""


def main(args):
    """`python -m workshop update`; raises `UserError` if it cannot be done."""
    git.require_clone()
    source = git.says("rev-parse", "--abbrev-ref", "@{upstream}")
    require(source, "git does not know where this clone's branch comes from: "
            "`git switch main`, or `git branch --set-upstream-to origin/main`")
    require(not git.names("diff", "--name-only", "--diff-filter=U")
            and not git.says("rev-parse", "--verify", "MERGE_HEAD"), "a merge "
            "is not finished here: `git merge --abort` goes back")
    fetch(source.split("/")[0])
    before, now = git.run("rev-parse", "HEAD"), time.strftime("%Y%m%d-%H%M%S")
    if commits := git.run("rev-list", f"{source}..HEAD").split():
        git.run("branch", f"mine-{now}")
        print(f"your commits ({len(commits)}) are in the branch mine-{now}")
    if git.names("diff", "--cached", "--name-only", "HEAD"):
        git.run("stash", "store", "-m", f"before the update of {now}",
                git.run("stash", "create"))
        git.run("reset", "--quiet")  # the files stay as they are
        print("what you had staged is in `git stash list`, too")
    with locked_desk():
        script = None
        try:
            for path in in_the_way(source):
                kept = set_aside(path)
                print(f"your {show_path(path)} is {show_path(kept)} now")
                if path == DESK:
                    script = kept
            git.run("reset", "--quiet", "--keep", source)
        finally:
            if script is not None:
                put_back(script)
    say_news(before, source)


def fetch(remote):
    """Ask the server for the newest course, and give up if it is silent."""
    url = git.says("remote", "get-url", remote) or remote
    options = ["-c", "http.lowSpeedLimit=1", "-c", "http.lowSpeedTime=30"]
    if not (git.says("config", "core.sshCommand")
            or {"GIT_SSH", "GIT_SSH_COMMAND"} & os.environ.keys()):
        options += ["-c", "core.sshCommand=ssh -o ConnectTimeout=15"]
    git.run("fetch", "--quiet", remote, options=options,
            slow=f"waiting for {url} (Ctrl-C ends this; nothing has changed)")


def in_the_way(source):
    """The paths where the newest course would replace what is not its own."""
    edited = git.names("diff", "--no-renames", "--name-only", "HEAD")
    # the desk's script is the attendee's, too, where it was committed
    edited |= git.names("diff", "--name-only", git.says(
        "merge-base", "HEAD", source) or source, "--", DESK_NAME)
    tracked = git.names("ls-files")
    found = set()
    for name in git.names("diff", "--no-renames", "--name-only", "HEAD",
                          source):
        path = ROOT / name
        # a file, or a link, where the newest course has a folder
        for folder in [*Path(name).parents][-2::-1]:
            if (ROOT / folder).is_symlink() or (ROOT / folder).is_file():
                found.add(ROOT / folder)
                break
        else:
            if os.path.lexists(path) and (
                    name in edited or name not in tracked
                    or (path.suffix == ".ipynb" and has_outputs(path))):
                found.add(path)
    return sorted(found)


def has_outputs(path):
    """Whether a notebook has outputs, or cannot be read."""
    try:
        return any(cell.get("outputs")
                   for cell in json.loads(path.read_bytes())["cells"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return True


def set_aside(path):
    """Give it a name with the date that is not taken; returns the new path."""
    if path == DESK:  # which may be a link, and has its own backups
        kept = back_up(read_script(DESK, most=-1))
        DESK.rename(ASIDE)
        return kept
    kept = next(name for name in dated_names(path)
                if not os.path.lexists(name))
    path.rename(kept)
    return kept


def dated_names(path):
    """`name.DATE.suffix` beside the file, then `name.DATE-2.suffix`, ..."""
    now = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        date = f"{now}-{number}" if number > 1 else now
        yield path.with_name(f"{path.stem}.{date}{path.suffix}")


def put_back(backup):
    """Let the desk's script be the attendee's again, and keep the backup.

    What an editor has saved there in between is newer, and stays.
    """
    if not DESK.exists() or not git.names(
            "diff", "--name-only", "HEAD", "--", DESK_NAME):
        ASIDE.replace(DESK)
        print(f"your {DESK_NAME} is as it was; a copy is "
              f"{show_path(backup)}")
    else:
        ASIDE.unlink()


def say_news(before, source):
    newest = git.run("log", "-1", "--format=%h of %cs, %s")
    changed = git.names("diff", "--name-only", before, "HEAD")
    print(f"this clone is {source} now: {newest}; {len(changed)} files have "
          "changed" if changed else f"nothing new: {source} is {newest}")
    if changed:
        print("Close and reopen those that are open in an editor, then run "
              "`source activate.sh` in your terminals.")
