"""What a run will do and cost, said before any weights are there: passes, memory, seconds, and what to change when it does not fit."""
