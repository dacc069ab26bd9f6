"""The command rankcheck: verify and why, for any training script."""

import os
import sys
import traceback

from rankcheck.system.command_line import Command, parse
from rankcheck.system.errors import UserError
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
    try:
        if sys.argv[1:] == ["--version"]:
            print(f"rankcheck {__version__}")
            return
        args = parse("rankcheck", "For any training script. COMMAND --help "
                     "describes each.", COMMANDS)
        sys.exit(args.function(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # of `| head`, for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            print(f"error: {sys.executable} has no torch; fix: start "
                  "rankcheck with the Python that trains", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.exit(2)  # also for a bug of ours: Python's own status would be 1


if __name__ == "__main__":
    main()
