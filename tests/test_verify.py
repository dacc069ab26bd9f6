"""`verify`: scripts in others' styles, right and with mistakes, each named.

All of them run by `python tests/verify_cases.py`; here are those that differ
in kind.
"""

from collections import Counter

import pytest
from conftest import needs
from verify_cases import CASES, STYLES, outcome, problem

NEEDS = {"HF Trainer": ("transformers", "accelerate")}


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name) for case in CASES if case.suite])
def test_a_script(case, tmp_path):
    needs(*NEEDS.get(case.style, ()))
    status, out = outcome(case, tmp_path)
    assert not problem(case, status, out), out


def test_each_style_has_four_mistakes():
    """Of those that others write, beside a loop by hand and ours."""
    mistakes = Counter(case.style for case in CASES
                       if case.mistake and not case.resumes)
    assert sum(count >= 4 for count in mistakes.values()) >= 12 + 1
    assert {case.style for case in CASES if not case.mistake} == set(STYLES)
