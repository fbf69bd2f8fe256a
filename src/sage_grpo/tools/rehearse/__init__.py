"""The dress rehearsal of a run, with random weights of the published sizes."""
