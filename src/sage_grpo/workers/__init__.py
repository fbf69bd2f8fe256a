"""Who makes the clips of an iteration: this process, or workers that take parts of its plan."""
