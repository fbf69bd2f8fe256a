"""Workers: sampling of an iteration's clips in other processes."""
