"""Rewards over HTTP: the server, its client, and their wire format."""

from sage_grpo.config.ranges import Count, Seconds, checked


@checked
class ServerLimits:
    """Limits on the server's load."""

    max_queue: Count = 256
    """Requests that wait or are scored at a time; more get status 503."""
    max_connections: Count = 2048
    """Connections at a time; more get status 503."""
    max_body_mb: Count = 1024
    """Largest request, in MB."""
    max_memory_mb: Count = 8192
    """Memory of all requests at a time, in MB; more get status 503."""
    header_timeout_s: Seconds = 10.0
    """Seconds in which a client must send its headers."""
    idle_timeout_s: Seconds = 10.0
    """Seconds that a client may pause while sending."""
    read_timeout_s: Seconds = 120.0
    """Seconds in which a client must send its whole request."""
