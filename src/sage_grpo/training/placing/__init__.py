"""Where things lie and how they get there: ranks, accelerator and CPU memory, and bits that stay the same."""
