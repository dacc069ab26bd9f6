"""What a file has to hold: a schema, checked where the file is read.

Anybody may have changed, copied or cut a file. A schema is one of

    a type           float: any finite number; int: one of 64 bits, no bool
    range(1, 10)     a whole number in it
    Literal["a"]     one of its values
    [schema]         a list or tuple, and what each of its elements is
    {"a": schema}    a dictionary with this key, and any others; "a?": the
                     key may be missing; str: all of its keys are names, and
                     what each of its values is

This needs only the standard library, from Python 3.9 on.
"""

import json
import os
import stat
from pathlib import Path
from typing import get_args

from backstage.errors import UserError

COUNT = range(1, 2**31)


def check(value, schema, place="it"):
    """Raise a `ValueError` unless the value is as the schema says."""
    if isinstance(schema, dict) and isinstance(value, dict):
        for key, part in schema.items():
            if key is str:
                check([*value], [str], place)
                check([*value.values()], [part], place)
            elif key.rstrip("?") in value:
                check(value[key.rstrip("?")], part, key.rstrip("?"))
            elif not key.endswith("?"):
                raise ValueError(f"{key} is missing")
    elif isinstance(schema, list) and isinstance(value, (list, tuple)):
        for part in value:
            check(part, schema[0], f"an element of {place}")
    elif not fits(value, schema):
        shown = (repr(value)[:40] if isinstance(value, (int, float, str))
                 else f"of type {type(value).__name__}")
        raise ValueError(f"{place} must not be {shown}")


def fits(value, schema):
    """Whether a value is as a schema without parts says."""
    kind = type(value)
    if isinstance(schema, range):
        return kind is int and value in schema
    if schema is int:
        return kind is int and -2**63 <= value < 2**63
    if schema is float:  # the comparison is false for nan
        return kind in (int, float) and abs(value) < 1e300
    if schema is str:  # no system call takes a zero byte
        return kind is str and "\0" not in value
    return (isinstance(value, schema) if isinstance(schema, type)
            else value in get_args(schema))


def require_file(path):
    """Raise an `OSError` or `ValueError` unless it is a regular file.

    One would wait for ever for what a pipe holds, and a device has no end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("not a file")


def read_json(file, schema, remedy):
    """What a JSON file holds.

    Raises `FileNotFoundError`, or a `UserError` that ends with the remedy if
    the file is damaged, or if the schema does not fit it.
    """
    try:
        require_file(file)
        value = json.loads(Path(file).read_bytes())
        check(value, schema)
        return value
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: damaged ({reason(error)}): {remedy}"
                        ) from error


def reason(error):
    """What a library says about a file, in one short line."""
    text = getattr(error, "strerror", None) or str(error)
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    return " ".join(first.split())[:200]
