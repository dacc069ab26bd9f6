"""`verify`: scripts in others' styles, right and with mistakes, each named.

All of them run by `python tests/verify_cases.py`; here are those that differ
in kind.
"""

import pytest
from conftest import needs
from verify_cases import CASES, Case, outcome, problem

from backstage.errors import UserError
from workshop.verify.command import main as verify

NEEDS = {"HF Trainer": ("transformers", "accelerate")}


AT_ONCE = {  # by `pytest` alone: one of each kind of question
    "DDP: right", "DDP: all read the same", "by hand: summed",
    "FSDP2: right", "starter resume: no optimizer"}


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name,
                 marks=() if case.name in AT_ONCE else pytest.mark.whole)
    for case in CASES if case.suite])
def test_a_script(case, tmp_path):
    needs(*NEEDS.get(case.style, ()))
    status, out = outcome(case, tmp_path)
    assert not problem(case, status, out), out


@pytest.mark.parametrize("number", [-1, 1, 65, 100_000])
def test_a_number_of_processes_that_cannot_be_is_a_line(number):
    with pytest.raises(UserError, match="-n is 2 to 64"):
        verify(["train.py"], number, 4)


def test_a_causal_mask_is_the_same_on_all_ranks(tmp_path):
    """Of infinities, whose difference is nan."""
    case = Case("DDP", "", ("weights are equal",), (
        ("nn.Sequential(nn", "nn.Sequential(Masked(), nn"),
        ("model = DDP(", """\
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    def forward(self, x): return x
model = DDP(""")))
    status, out = outcome(case, tmp_path)
    assert not problem(case, status, out), out
    assert "buffers differ" not in out, out
