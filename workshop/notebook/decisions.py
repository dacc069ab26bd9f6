"""Moved to workshop/arithmetic.py."""

from workshop.arithmetic import GPT2, XL, activations, state  # noqa: F401
from workshop.arithmetic import decisions as rows  # noqa: F401
