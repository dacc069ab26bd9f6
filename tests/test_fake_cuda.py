"""benchmarks/fake_cuda.py: it counts right, and says what it needs.

The script itself needs a CUDA build of torch: no test runs it.
"""

import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from backstage import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import fake_cuda


@pytest.mark.skipif(torch.version.cuda, reason="this torch would run it")
def test_a_build_for_cpus_is_one_line():
    end = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "fake_cuda.py"],
        capture_output=True, text=True)
    assert end.returncode == 1 and end.stdout == ""
    line, = end.stderr.splitlines()
    assert "needs a CUDA build of torch" in line and "pip install" in line


@pytest.fixture
def device():
    device = fake_cuda.Device()
    with FakeTensorMode(allow_non_fake_inputs=True), device:
        yield device


def test_what_waits_for_the_device_is_counted(device):
    copy = torch.ops.aten._to_copy.default
    x = torch.ones(8)
    y = copy(x, device="cuda:0", non_blocking=True)
    y = (2 * y).sum()
    count = device.take_count()
    assert count["copies"] == 1 and count["waits"] == 0
    for mistake in (lambda: y.item(), lambda: y > 0 or 1,
                    lambda: y.cpu(), lambda: copy(x, device="cuda:0")):
        mistake()
        assert device.take_count()["waits"] == 1


def test_operations_are_counted_with_their_bytes(device):
    a = torch.zeros(128, 256, device="cuda")
    b = torch.zeros(256, 64, device="cuda")
    device.take_count()
    c = a @ b
    c.view(-1)
    assert device.take_count() == {"products": 1, "flop": 2 * 128 * 256 * 64}
    c.add_(1)
    assert device.take_count() == {"others": 1, "bytes": 2 * 4 * 128 * 64}


def test_memory_is_counted_until_nothing_holds_it(device):
    a = torch.zeros(1000, device="cuda")  # 4,000 bytes: 8 units of 512
    part = a.view(10, 100)
    assert device.memory == 4096
    del a
    assert device.memory == 4096
    b = torch.zeros(1, device="cuda")
    del part
    assert (device.memory, device.take_peak()) == (512, 4608)
    del b
    assert (device.memory, device.take_peak()) == (0, 512)
