"""`python -m sage_grpo` is the command `sage-grpo`."""

import sys

from sage_grpo.cli import main

sys.exit(main())
