"""Starting the processes of one node: PyTorch's own elastic agent, which also restarts and cleans up."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_module(
    module: str, arguments: Sequence[str], *, processes: int, max_restarts: int = 0, grace: int = 120
) -> int:
    """Run `python -m module arguments` in several processes; returns the exit status.

    When one of them fails, the agent ends the others (SIGTERM, after `grace` seconds SIGKILL) and starts all anew,
    `max_restarts` times at most. A SIGTERM to this process goes on to them too: they save and leave.
    """
    # Without this every process starts as many threads as there are cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace)
    # Under nohup the run is meant to outlive its terminal.
    ignored = "SIGHUP" in signal.Signals.__members__ and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.5,
        signals_to_handle="SIGTERM,SIGINT,SIGQUIT" if ignored else "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        # The processes write to our own output; the agent's folder for theirs would only be left behind in the system's /tmp.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as failure:
        first = failure.get_first_failure()[1]
        how = f"signal {-first.exitcode}" if first.exitcode < 0 else f"exit status {first.exitcode}"
        # Status 2 is a command that cannot work, which no checkpoint helps.
        go_on = "" if first.exitcode == 2 else " The same command continues from the last checkpoint."
        print(
            f"sage-grpo launch: rank {first.global_rank if first.local_rank is None else first.local_rank} failed first ({how}); "
            f"its output above says why.{go_on}",
            file=sys.stderr,
        )
        return 1
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0
