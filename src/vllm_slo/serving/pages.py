"""The process of the pages: runs Streamlit, and ends when whoever started it is gone, however that went.

Its standard input is a pipe that nobody writes to: it closes with the last process that holds the other end.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time

_PATIENCE_SECONDS = 3.0


def main() -> None:
    """Run ``streamlit`` with the arguments of this process."""
    threading.Thread(target=_end_with_the_pipe, daemon=True).start()
    runpy.run_module("streamlit", run_name="__main__", alter_sys=True)


def _end_with_the_pipe() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
