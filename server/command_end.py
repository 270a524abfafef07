"""How a command ends that was broken off, by Ctrl-C, a file that fails or a reader that goes: no traceback.

Knows no command: what each refuses in its own words, it refuses itself.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # what shells expect of a process that Ctrl-C ended
UNREAD = 141  # and of one that SIGPIPE ended
ADVICE = {
    errno.ENOSPC: "free some space or name a place on another disk",
    errno.EROFS: "name another place",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "a part of this path is a file",
    errno.ENOENT: "check the path",
    errno.EMFILE: "raise the limit with `ulimit -n`",
}


def guarded(command: str, run: Callable[[], int]) -> int:
    """What `run` returns; 1 for an OSError that it lets through, 130 for Ctrl-C, each with its line on stderr.

    141 and no word when the reader of stdout has gone, as `head` does once it has its lines.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # threads are waited for: a second one would print a traceback
        begin = "\n" if sys.stderr.isatty() else ""  # the terminal has echoed ^C
        print(f"{begin}ropeway {command}: {': '.join(['interrupted', *map(str, stop.args)])}", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError) and is_unread(sys.stdout.fileno()):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
            return UNREAD
        print(f"ropeway {command}: {line_of(error)}", file=sys.stderr)
        return 1


def is_unread(descriptor: int) -> bool:
    """Whether it is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def importing(command: str) -> Iterator[None]:
    """Ctrl-C ends the process here and now: raised in an import it may be lost, as numpy makes an ImportError of it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a background job ignores it
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        os.write(2, f"ropeway {command}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def line_of(error: OSError) -> str:
    """PATH: what the system said: what to do."""
    where = error.filename2 if error.filename is None else error.filename
    parts = [where, error.strerror or str(error), ADVICE.get(error.errno or 0)]
    return ": ".join(str(part) for part in parts if part is not None)
