"""Ranks end with their launcher: one that was killed cannot end them, so they watch it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

INTERVAL = 0.5
"""Seconds between looks."""


def end_with_parent(grace: float | None = None) -> None:
    """From a thread, watch the process that started this one. When it is gone, stop as for SIGTERM (finish the iteration, save,
    leave); whoever is still here after `grace` seconds (the launcher's) ends at once.

    A process whose parent ends gets another one, on every POSIX system.
    """
    if grace is None:
        grace = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    threading.Thread(target=_watch, args=(os.getppid(), grace), name="parent", daemon=True).start()


def _watch(parent: int, grace: float) -> None:
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    print(f"sage-grpo: the launcher (process {parent}) is gone: saving and leaving.", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os._exit(1)
