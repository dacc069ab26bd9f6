"""Git, in this clone of the course alone.

Git obeys variables that name another repository, as a hook or somebody's
dotfiles set them, and takes the folder around the course for the repository
where the course has none of its own. What changes files asks `require_clone`
first. Only the standard library, from Python 3.9 on.
"""

import os
import subprocess

from backstage import ROOT
from backstage.errors import UserError, require

# The variables that say how git reaches a server, and whose settings it reads.
# All others, which may name another repository, are taken out.
KEPT = ("GIT_ASKPASS", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_NOSYSTEM",
        "GIT_CONFIG_SYSTEM", "GIT_EXEC_PATH", "GIT_PROXY_", "GIT_SSH",
        "GIT_SSL_", "GIT_TRACE")
NOT_A_CLONE = ("get the course with `git clone`, and copy your code/"
               "train_gpt2.py into that")


def start(*arguments, **options):
    """Start `git arguments...` in this clone: a `subprocess.Popen`."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("GIT_") or name.startswith(KEPT)}
    # it must not ask for a password: there may be no terminal
    env |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        return subprocess.Popen(
            ["git", "-C", str(ROOT), *map(str, arguments)], env=env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, **options)
    except FileNotFoundError as error:
        raise UserError("there is no git here: load your site's module, or "
                        "install it") from error


def run(*arguments, options=(), slow=None):
    """What git prints; raises a `UserError` with its reason if it fails.

    options: git's own, before the command; slow: a line to print if it takes
    longer than five seconds.
    """
    with start(*options, *arguments) as git:
        try:
            out, err = git.communicate(timeout=5 if slow else None)
        except subprocess.TimeoutExpired:
            print(slow, flush=True)
            out, err = git.communicate()
    said = err.decode(errors="replace").strip().splitlines()
    require(git.returncode == 0, f"git {arguments[0]} failed "
            f"({said[0] if said else 'no message'}): nothing is lost; settle "
            "this, then try again")
    return os.fsdecode(out).strip()


def says(*arguments):
    """What git prints, or "" if it fails."""
    try:
        return run(*arguments)
    except UserError:
        return ""


def names(command, *arguments):
    """The set of file names that git prints, whatever their characters."""
    return set(run(command, "-z", *arguments).split("\0")) - {""}


def require_clone():
    """Raise a `UserError` unless the course is a git clone by itself."""
    with start("rev-parse", "--show-toplevel") as git:
        out, err = git.communicate()
    said = err.decode(errors="replace").strip().partition("\n")[0]
    if git.returncode and "not a git repository" not in said:
        raise UserError(f"git does not work in {ROOT}: {said}")
    top = os.fsdecode(out).rstrip("\n")
    require(top, f"{ROOT} is not a git clone: {NOT_A_CLONE}")
    require(os.path.samefile(top, ROOT), f"{ROOT} is not a git clone by "
            f"itself, but a folder in the repository {top}, which stays as "
            f"it is: {NOT_A_CLONE}")
