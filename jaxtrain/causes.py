"""What to say of an error that the system or a library raised."""

import errno
import os


def cause(error: BaseException) -> str:
    """One line: what the system said, or the first line of what a library made of it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO):
        if (known := os.strerror(number)) in text:
            return known
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"
