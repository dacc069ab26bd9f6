"""Git, in this clone of the course alone."""

from __future__ import annotations

import os
import subprocess

from backstage import ROOT
from backstage.errors import UserError, require
from backstage.files import StrPath

# Variables of how git reaches a server, whose settings it reads, who commits;
# all others, which may name another repository, are taken out.
KEPT_PREFIXES = (
    "GIT_ASKPASS", "GIT_AUTHOR_", "GIT_COMMITTER_", "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_NOSYSTEM", "GIT_CONFIG_SYSTEM", "GIT_EXEC_PATH", "GIT_PROXY_",
    "GIT_SSH", "GIT_SSL_", "GIT_TRACE")
GIT_VARIABLES = {
    "GIT_CEILING_DIRECTORIES": str(ROOT.parent),  # no repository around it
    "GIT_WORK_TREE": str(ROOT), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C",
    "GIT_HTTP_LOW_SPEED_LIMIT": "1", "GIT_HTTP_LOW_SPEED_TIME": "30",
    # no hooks: one that fails, of all of somebody's clones, would end it
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.hooksPath",
    "GIT_CONFIG_VALUE_0": os.devnull}


def run_git(*arguments: StrPath,
            fix: str = "solve this, then try again; nothing is lost") -> str:
    """What git prints; raises a `UserError` with its reason if it fails."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("GIT_")
           or name.startswith(KEPT_PREFIXES)} | GIT_VARIABLES
    try:
        git = subprocess.run(["git", *arguments], cwd=ROOT, env=env,
                             stdin=subprocess.DEVNULL, capture_output=True)
    except FileNotFoundError as error:
        raise UserError("git is not installed; fix: load your site's module, "
                        "or install it") from error
    output = git.stderr or git.stdout or b"no message"
    reason = " ".join(os.fsdecode(output).split())
    require(not git.returncode, f"git {arguments[0]}: {reason}; fix: {fix}")
    return os.fsdecode(git.stdout).strip("\n")


def list_names(*arguments: StrPath) -> set[str]:
    """The set of file names that git prints, whatever their characters."""
    return {*run_git(*arguments).split("\0")} - {""}
