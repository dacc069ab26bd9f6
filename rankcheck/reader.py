"""Reads what somebody else may have put in a file's place.

Only the standard library, from Python 3.9 on.
"""

import errno
import os
import stat


def read_regular(path, most=-1, flags=0):
    """The bytes of a file, so many at most; flags: further ones of `os.open`.

    Whatever else has that name is an `OSError`: a FIFO, which would wait for
    a writer, a device, which may never end, a folder, a socket.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(file, "rb", closefd=False) as opened:
            return opened.read(most)
    finally:
        os.close(file)
