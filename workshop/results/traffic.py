"""Moved to workshop/arithmetic.py."""

from workshop.arithmetic import of_step  # noqa: F401
