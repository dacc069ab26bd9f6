"""The version of rankcheck, and that of PyTorch which it needs."""

from __future__ import annotations

import re

from rankcheck.system.errors import UserError

__version__ = "0.1"
OLDEST_TORCH = (2, 11)  # whose flight recorder and hooks it reads


def require_torch() -> None:
    """Check the version of PyTorch, without importing it.

    A build that says nothing of its version is taken for a new one.

    Raises:
        UserError: it is older than `OLDEST_TORCH`.
    """
    from importlib import metadata  # a guarded Python does without

    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None:
        return
    if (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UserError(f"PyTorch {installed} is older than {oldest}, which "
                        "rankcheck needs; fix: install a newer one")
