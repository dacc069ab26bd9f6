"""`rankcheck verify`: the starter, right and with mistakes, each named.

The scripts are in tests/tables/starter, in the form of rankcheck's own table:
rankcheck_testing/verify_cases.py.
"""

import pytest

from backstage import ROOT
from rankcheck_testing.planted import load_all
from rankcheck_testing.verify_cases import (
    Style,
    make_params,
    outcome,
    problem,
)

CASES = load_all(ROOT / "tests/tables/starter", ROOT)
AT_ONCE = {"starter: no optimizer"}  # by `pytest` alone
STARTER = Style(
    flags=("--run-dir", "run-{run}", "--checkpoint-every", "2"),
    resume="--resume")


@pytest.mark.whole
@pytest.mark.parametrize("case", make_params(CASES, AT_ONCE))
def test_a_script(case, tmp_path):
    found = outcome(case, tmp_path, STARTER)
    assert not problem(case, found), found.out
