"""Files that are written all or nothing: what is there, and what is said.

Where the file system cannot do something, or fails at any point.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from backstage import files
from backstage.checkpoint import load_checkpoint, write_checkpoint
from backstage.errors import UserError
from backstage.files import write_atomically

OLD, NEW = b"what was there", b"what is written"


def fail_for(what: str, number: int, after: bool = False):
    """A function like os.`what` that fails, after its work or before."""
    real = getattr(os, what)

    def fail(*arguments, **options):
        if after:
            real(*arguments, **options)
        raise OSError(number, os.strerror(number))

    return fail


def fail_for_folders(number: int, real: Callable = os.fsync):
    """As on file systems that cannot write a folder."""
    def sync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        real(handle)

    return sync


@pytest.mark.parametrize("number", [
    errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS, errno.EACCES])
def test_a_folder_that_cannot_be_synced(number, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail_for_folders(number))
    write_atomically(tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_mode_that_cannot_be_set(number, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(OLD)
    monkeypatch.setattr(os, "chmod", fail_for("chmod", number))
    write_atomically(tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW


@pytest.mark.skipif(os.getuid() == 0, reason="root may read all")
def test_a_folder_that_may_not_be_read(tmp_path):
    tmp_path.chmod(0o300)
    write_atomically(tmp_path / "file", NEW)
    tmp_path.chmod(0o700)
    assert (tmp_path / "file").read_bytes() == NEW


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize(("what", "function", "replaced"), [
    ("fsync", fail_for("fsync", errno.EIO), False),
    ("replace", fail_for("replace", errno.EIO), False),
    ("replace", fail_for("replace", errno.EIO, after=True), True),
    ("fsync", fail_for_folders(errno.EIO), True),
    ("fsync", fail_for_folders(errno.ENOSPC), True)])
def test_a_failure_says_what_is_there(
        what, function, replaced, existed, tmp_path, monkeypatch):
    """The advice is for a file that is not there."""
    file = tmp_path / "file"
    if existed:
        file.write_bytes(OLD)
    monkeypatch.setattr(os, what, function)
    with pytest.raises(UserError) as error:
        write_atomically(file, NEW, ": the advice")
    said = str(error.value)
    assert ("could not be written" in said) == (not replaced)
    assert ("is unchanged" in said) == (existed and not replaced)
    assert ("was written, but" in said) == replaced
    assert said.endswith(": the advice") == (not replaced)
    if replaced:
        assert file.read_bytes() == NEW
    elif existed:
        assert file.read_bytes() == OLD
    assert not [*tmp_path.glob(f".*{files.PART}")]


def test_a_part_that_cannot_be_removed_hides_no_failure(
        tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail_for("fsync", errno.EIO))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail_for("unlink", errno.EBUSY))
        with pytest.raises(UserError, match="Input/output error"):
            write_atomically(tmp_path / "file", NEW)
    assert [*tmp_path.glob(f".*{files.PART}")]
    files.remove_parts(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_old_checkpoints_that_cannot_be_removed_stop_nothing(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "unlink", fail_for("unlink", errno.EACCES))
    for step in range(1, 5):
        write_checkpoint(tmp_path, {"step": step})
    assert len([*tmp_path.glob("step_*.pt")]) == 4
    line, more = capsys.readouterr().err.splitlines()
    assert "step_00000001.pt could not be removed (Permission denied)" in line
    assert "nor could 1 more" in more


def test_an_earlier_checkpoint_is_named_where_there_is_one(
        tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for("fsync", errno.EIO))
        with pytest.raises(UserError, match="there is no earlier checkpoint"):
            write_checkpoint(tmp_path, {"step": 1})
    write_checkpoint(tmp_path, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for("fsync", errno.EIO))
        with pytest.raises(UserError, match=r"from .*, step_00000001\.pt$"):
            write_checkpoint(tmp_path, {"step": 2})
        patch.setattr(os, "fsync", fail_for_folders(errno.EIO))
        with pytest.raises(UserError, match=r"00002\.pt was written, but"):
            write_checkpoint(tmp_path, {"step": 2})
    assert load_checkpoint(tmp_path / "step_00000002.pt")["step"] == 2


def test_a_checkpoint_is_read_where_no_file_is_mapped(tmp_path, monkeypatch):
    """As on FUSE with direct_io."""
    import torch

    write_checkpoint(tmp_path, {"step": 1})
    real = torch.load

    def load(file, **options):
        if options.get("mmap"):
            raise RuntimeError("unable to mmap 3 bytes from file <x>: No such "
                               "device (19)")
        return real(file, **options)

    monkeypatch.setattr(torch, "load", load)
    assert load_checkpoint(tmp_path / "step_00000001.pt")["step"] == 1
