"""`python -m sage_grpo` is the command `sage-grpo`."""

import atexit
import os
import sys

from sage_grpo.cli.main import main

status = main()
if "RANK" in os.environ:
    # One process of several. Threads of the store and of gloo may still be in C++ when the interpreter is taken down under them,
    # which aborts a process whose work is done ("terminate called without an active exception") and fails the whole job.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
sys.exit(status)
