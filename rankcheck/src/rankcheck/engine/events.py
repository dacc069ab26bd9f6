"""The collectives in a rank's record, a line of JSON for each."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]  # a line: see `Log`
# Calls that only two ranks make
TO_ONE = ("send", "ssend", "isend", "issend", "recv", "irecv")
