"""The command rankcheck: verify and why, for any training script."""

import sys

from rankcheck.system.command_line import Command, exit_with, parse
from rankcheck.system.version import __version__

COMMANDS = {
    "verify": Command(
        "rankcheck.verification.command", "Run any training script with one "
        "process and with several for a few optimizer steps, and compare "
        "them."),
    "why": Command(
        "rankcheck.why.command", "Say why a job of several processes hangs, "
        "has ended or is slow: which rank, and which line.")}


def main() -> None:
    """Exit with 0 if nothing is wrong, 1 if something is, else with 2."""
    if sys.version_info < (3, 10):
        print(f"error: {sys.executable} is Python {sys.version.split()[0]}, "
              "and rankcheck needs 3.10 or later; fix: start it with a newer "
              "one; the job that `why` watches may have 3.9", file=sys.stderr)
        sys.exit(2)
    exit_with(run)


def run() -> int:
    """Do what the command line says; return the exit status."""
    if sys.argv[1:] == ["--version"]:
        print(f"rankcheck {__version__}")
        return 0
    args = parse("rankcheck", "For any training script. COMMAND --help "
                 "describes each.", COMMANDS)
    return int(args.function(args))


if __name__ == "__main__":
    main()
