"""Report errors of rankcheck as errors of the course's tools.

backstage and rankcheck know nothing of each other: each has a `UserError`, a
line that says what is wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from backstage import errors
from rankcheck.system.errors import UserError


def run_tool(main: Callable[[], object]) -> NoReturn:
    """Call `main()` as `backstage.errors.run_main` does.

    An error of rankcheck's is one line, too.
    """
    def call() -> None:
        try:
            main()
        except UserError as error:
            raise as_own(error) from error

    errors.run_main(call)


def as_own(error: UserError) -> errors.UserError:
    """Return an error of rankcheck as one of the course."""
    own = errors.UserError(str(error))
    own.status = error.status
    return own
