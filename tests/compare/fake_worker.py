"""The body of a worker process without the libraries: the name of the arm decides its end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from sage_grpo.tools.compare.worker import end_with_parent


def serve(connection: Connection, log: Path, environment: Mapping[str, str], *more: object) -> None:
    while True:
        job = connection.recv()
        kind = job.arm.split()[0]
        with log.open("a") as stream:
            stream.write(f"--- {job.arm} {environment['OWN']}\n")
        if kind == "dies":
            os._exit(9)
        connection.send({"note": "begun"})
        if kind == "hangs":
            time.sleep(1000)
        row = {"arm": job.arm, "key": job.key, "status": "done", "error": None, "evaluations": {}, "pid": os.getpid()}
        if kind == "fails":
            connection.send({"row": row | {"status": "failed", "error": "it broke"}})
            sys.exit(1)
        connection.send({"row": row})


def outlive() -> None:
    """Busy when its parent ends, as a worker in a run is."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    time.sleep(10)
    print("outlived", flush=True)
