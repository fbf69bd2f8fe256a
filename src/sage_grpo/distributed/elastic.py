"""Starting the processes of one node: PyTorch's own elastic agent, which also restarts and cleans up."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

REFUSED = 2
"""Exit status of a refused command: a user's mistake, which another try would only repeat."""


def run_module(
    module: str, arguments: Sequence[str], *, processes: int, max_restarts: int = 0, grace: int = 120
) -> int:
    """Run `python -m module arguments` in several processes; returns the exit status.

    When one of them fails, the agent ends the others (SIGTERM, after `grace` seconds SIGKILL). All are started anew, `max_restarts` times at most,
    unless the command was refused. A SIGTERM to this process is passed on, so that they save and exit.
    """
    # Without this every process starts as many threads as there are cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace)
    # Under nohup the run is meant to outlive its terminal.
    ignored = "SIGHUP" in signal.Signals.__members__ and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for left in range(max_restarts, -1, -1):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,  # the agent would also restart a refused command
            monitor_interval=0.5,
            signals_to_handle="SIGTERM,SIGINT,SIGQUIT" if ignored else "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            # The processes write to our own output; the agent's folder for theirs would only be left behind in the system's /tmp.
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
            return 0
        except ChildFailedError as failure:
            first = failure.get_first_failure()[1]
            if first.exitcode == REFUSED:
                return REFUSED  # it has printed the reason
            how = f"signal {-first.exitcode}" if first.exitcode < 0 else f"exit status {first.exitcode}"
            rank = first.global_rank if first.local_rank is None else first.local_rank
            next_ = (
                f"All start again ({left} more)." if left else "The same command continues from the last checkpoint."
            )
            print(
                f"sage-grpo launch: rank {rank} failed first ({how}); its output above says why. {next_}",
                file=sys.stderr,
                flush=True,
            )
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
    return 1


def is_first_to_say(text: str) -> bool:
    """True if no other process of this run has reported the same text, by the launcher's store, or if the store cannot be reached."""
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        return store.add(f"sage_grpo/said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True
