"""The subcommands: each module has an Options dataclass and a run function."""
