"""What a run tells: metrics and loggers, the terminal, events for programs, videos, profiles; and who of them watches the loop."""
