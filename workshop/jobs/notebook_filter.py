"""The filter of notebooks: git sees them as if no cell had ever run.

`activate.sh` names it as this clone's `filter.nbstripout.clean`. Git starts it
once for each notebook that may have changed, in many of its commands, so it
imports nothing that takes long to load: no nbformat, and no module of the
course. What it writes is what nbformat writes of a notebook without outputs.
Git keeps a file that the filter does not understand as it is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

# What JupyterLab notes of the kernel in which somebody has run a notebook
OF_THE_KERNEL = ("codemirror_mode", "file_extension", "mimetype",
                 "nbconvert_exporter", "pygments_lexer", "version")
OF_THE_NOTEBOOK = ("orig_nbformat", "orig_nbformat_minor", "signature",
                   "widgets")
# How somebody looks at a cell, and when it ran
OF_A_CELL = ("ExecuteTime", "collapsed", "execution", "heading_collapsed",
             "hidden", "scrolled", "trusted")


def main() -> None:
    """Filter standard input to standard output."""
    sys.stdout.buffer.write(clean(sys.stdin.buffer.read()))


def clean(data: bytes) -> bytes:
    """Return a notebook without what running it leaves; others unchanged."""
    try:
        book = json.loads(data)
        if book["nbformat"] != 4:
            return data
        remove_outputs(book)
        text = json.dumps(book, ensure_ascii=False, indent=1, sort_keys=True,
                          separators=(",", ": "))
        return text.encode() + b"\n"
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return data  # it is no notebook


def remove_outputs(book: dict[str, Any]) -> None:
    """Remove from a notebook, in place, what running it leaves."""
    remove_filter(book["metadata"], OF_THE_NOTEBOOK)
    remove_filter(book["metadata"].get("language_info", {}), OF_THE_KERNEL)
    for cell in book["cells"]:
        remove_filter(cell["metadata"], OF_A_CELL)
        if "outputs" in cell:
            cell["outputs"] = []
        if "execution_count" in cell:
            cell["execution_count"] = None
        source = cell["source"]
        if isinstance(source, list):
            source = "".join(source)
        cell["source"] = source.splitlines(keepends=True)


def remove_filter(entries: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        entries.pop(name, None)


if __name__ == "__main__":
    main()
