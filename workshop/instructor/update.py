"""Merge the newest course into this clone, and keep local edits.

Edited files are copied before; the working copy stays. Where an edit and the
course conflict, the edit is in the copy and in the stash.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from pathlib import Path

from backstage import ROOT
from backstage.errors import UserError, require, visible
from backstage.files import show_path
from rankcheck.engine.findings import count_of
from rankcheck.system.errors import read_regular
from workshop.diff.backups import BACKUPS, back_up, lock_working_copy
from workshop.jobs import git
from workshop.stages import WORKING_COPY

ASIDE = BACKUPS / "aside"  # the working copy while git renews the others
CHANGED = "diff", "--name-only", "--no-renames", "-z"


def main(args: argparse.Namespace) -> None:
    """`python -m workshop update`; raises `UserError` if it cannot be done."""
    announce_step("checking this clone")
    merge = ROOT / git.run_git("rev-parse", "--git-path", "MERGE_HEAD", fix="\
get the course with `git clone`, and copy your code/train_gpt2.py into that")
    source = git.run_git("rev-parse", "--abbrev-ref", "@{upstream}",
                         fix="`git "
                         "switch main`, or `git branch --set-upstream-to ...`")
    with lock_working_copy():
        give_back(source)
    require(not merge.exists()
            and not git.list_names(*CHANGED, "--diff-filter=U"),
            "a merge is not finished here; fix: `git status` says how")
    store_autostash()
    announce_step(f"fetching {source}")
    git.run_git("fetch", "--quiet")
    newest = git.run_git("log", "-1", f"--format={source}, %h of %cs, %s",
                         source)
    if not (news := git.list_names(*CHANGED, f"HEAD...{source}")):
        print(f"nothing new in {visible(newest)}")
        return
    announce_step("copying what you edited")
    with lock_working_copy():
        copies = copy_edits({name for name in news if name.endswith(".ipynb")})
        in_the_way = git.list_names("ls-files", "--killed", "-z") | {
            name for name in news - git.list_names("ls-files", "-z")
            if os.path.lexists(ROOT / name)}  # a merge overwrites the ignored
        require(not in_the_way, f"{', '.join(in_the_way)}: the course has "
                "another file there; fix: move yours away, then try again")
        # Ctrl-C, or closing the terminal, stops nothing halfway, nor git
        signal.pthread_sigmask(signal.SIG_BLOCK, {
            signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
        announce_step(f"merging {source}")
        stashes = git.run_git("stash", "list")
        edited = WORKING_COPY.exists() and git.list_names(
            *CHANGED, "HEAD", "--", WORKING_COPY)
        try:
            if edited:
                WORKING_COPY.rename(ASIDE)
                git.run_git("checkout", "HEAD", "--", WORKING_COPY)
            git.run_git("merge", "-q", "--no-edit", "--autostash",
                        "--no-overwrite-ignore", source, fix="if your commits "
                        "change what the course changes, merge by hand: `git "
                        "pull`; nothing has changed yet")
        except UserError:
            if merge.exists():
                git.run_git("merge", "--abort")
            raise
        finally:  # what an editor has saved there meanwhile is newer
            if edited:
                move_back(WORKING_COPY.exists() and git.list_names(
                    *CHANGED, "HEAD", "--", WORKING_COPY))
    if clashes := git.list_names(*CHANGED, "--diff-filter=U"):
        git.run_git("add", "--", *clashes)  # what is unmerged is not restored
        git.run_git("restore", "--staged", "--", *clashes)
        # what has gone there stays
        clashes &= git.list_names("ls-files", "-z")
        if clashes:
            git.run_git("restore", "--", *clashes)
            print("changed by you and by the course: "
                  f"{', '.join(sorted(clashes))}; the course's version is "
                  f"there, yours is in {copies}, and in `git stash list`")
    elif git.run_git("stash", "list") != stashes:  # git has refused to restore
        print("your edits of the course's files could not be restored; they "
              f"are in {copies}, and in `git stash list`")
    print(f"{count_of(len(news), 'file')} changed; this clone is "
          f"{visible(newest)}\nClose and "
          "reopen those that are open, then run `source activate.sh` again.")


def announce_step(step: str) -> None:
    """Print what comes next at once: on a busy node each step takes long."""
    print(step, flush=True)


def move_back(edited: object) -> Path | None:
    """Move the script that is aside back, or to the backups.

    edited: whether somebody has saved another script there meanwhile. Returns
    the backup, or None.
    """
    if not edited:
        ASIDE.replace(WORKING_COPY)
        return None
    backup = None
    if not ASIDE.is_symlink():  # then the script itself is elsewhere
        backup = back_up(read_regular(ASIDE))
    ASIDE.unlink()
    return backup


def give_back(source: str) -> None:
    """Restore the script that a killed update had moved away."""
    if os.path.lexists(ASIDE):
        edited = WORKING_COPY.exists() and all(
            git.list_names(*CHANGED, version, "--", WORKING_COPY)
            for version in ("HEAD", source))
        backup = move_back(edited)
        where = "is restored"
        if edited:
            where = "was edited since, and is kept"
        if backup:
            where += f"; the version before that is {show_path(backup)}"
        print("an earlier update was killed: your "
              f"{show_path(WORKING_COPY)} {where}")


def store_autostash() -> None:
    """Keep what git had stashed for a merge that was killed."""
    stash = ROOT / git.run_git("rev-parse", "--git-path", "MERGE_AUTOSTASH")
    if stash.exists():
        git.run_git("stash", "store", "-m",
                    "edits that a killed merge had put "
                    "away", stash.read_text("utf-8").strip())
        stash.unlink()
        # an update's, or one that somebody has typed
        print("an earlier merge was killed: the edits that it had stashed "
              "are in `git stash list`")


def copy_edits(more: set[str]) -> str:
    """Copy what is edited, and these, into a folder of this moment: its name.

    What is staged, in states that no file may have any more, is there, too.
    """
    copies = BACKUPS / time.strftime("update-%Y%m%d-%H%M%S")
    git.run_git("checkout-index", f"--prefix={copies}/staged/", "--",
                *git.list_names(*CHANGED, "--cached", "--diff-filter=d"))
    git.run_git("restore", "--staged", ":/")
    # what its filter calls the same, such as a notebook that was run, would be
    # checked out anew: git adds nothing, and takes it for unchanged
    git.run_git("add", "--", *git.list_names("diff-files", "--name-only", "-z")
                - git.list_names(*CHANGED))
    for name in git.list_names(*CHANGED, "HEAD") | more:
        if (ROOT / name).is_file():
            (copies / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copies / name)
    if copies.exists():
        print("your edited files, and the notebooks that change, are copied "
              f"to {show_path(copies)}")
    return show_path(copies)
