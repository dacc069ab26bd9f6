"""rankcheck: does any training script train alike on several processes, and
why does a job hang?
"""

import sys

from rankcheck.command_line import parse
from rankcheck.errors import UserError

COMMANDS = {
    "verify": ("rankcheck.verify.command", "Run any training script as one "
               "process and as several for a few updates: does it train "
               "alike?"),
    "why": ("rankcheck.why.command", "Say why a job of several processes "
            "hangs, has ended or is slow: which rank, and which line.")}


def main():
    try:
        args = parse("rankcheck", "For any training script. COMMAND --help "
                     "says more of each.", {"commands": COMMANDS})
        sys.exit(args.function(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "status", 1))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"error: {sys.executable} has no torch: start rankcheck by the "
              "Python that trains", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
