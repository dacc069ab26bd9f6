"""The command line of any script: a wrong flag is one line, no box."""

import contextlib
import io
import re

import tyro

from backstage.errors import UserError


def parse_flags(cls, **options):
    """`tyro.cli(cls, **options)`, but a wrong flag is a `UserError`."""
    box = io.StringIO()  # tyro draws its errors on stderr, in a box
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(cls, **options)
    except SystemExit as end:
        if not end.code:  # --help
            raise
    text = re.sub(r"\x1b\[[\d;]*m", "", box.getvalue())  # without colours
    rows = [row.strip(" │") for row in text.splitlines()]
    edges = [number for number, row in enumerate(rows)
             if re.match("[╭╰]|[─-]+$", row)]  # hyphens: no UTF-8 here
    first, end, *_ = *edges, 0, 0
    reason = " ".join(rows[first + 1:end]) or "wrong flags"
    reason = reason[0].lower() + reason[1:].rstrip(".")
    raise UserError(f"{reason}: see --help")
