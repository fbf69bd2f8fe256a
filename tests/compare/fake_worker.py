"""A worker's side of the conversation, without the libraries: the name of the arm decides its end."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection


def main(descriptor: int) -> None:
    pool = Connection(descriptor)
    while True:
        job = pool.recv().job
        kind = job.arm.split()[0]
        print("---", job.arm, os.environ.get("OWN", ""), file=sys.stderr, flush=True)
        if kind == "dies":
            os._exit(9)
        pool.send({"done": 1})
        if kind == "hangs":
            time.sleep(1000)
        row = {"arm": job.arm, "key": job.key, "status": "done", "error": None, "evaluations": {}, "pid": os.getpid()}
        if kind == "fails":
            pool.send({"row": row | {"status": "failed", "error": "it broke"}})
            sys.exit(1)
        pool.send({"row": row})


if __name__ == "__main__":
    main(int(sys.argv[1]))
