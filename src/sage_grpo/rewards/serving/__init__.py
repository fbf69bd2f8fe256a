"""Rewards over HTTP: the server, its client, and their wire format."""

from sage_grpo.config.ranges import Count, Seconds, checked


@checked
class ServerLimits:
    """Limits on the server's load."""

    max_queue: Count = 256
    """Requests that wait or are scored at a time; more are answered 503."""
    max_connections: Count = 2048
    """Connections at a time. More are answered 503."""
    max_body_mb: Count = 1024
    """Largest request."""
    max_memory_mb: Count = 8192
    """Bytes of all requests at a time; more are answered 503."""
    header_timeout_s: Seconds = 10.0
    """Seconds that a connection may be open without complete headers of a request."""
    idle_timeout_s: Seconds = 10.0
    """Seconds that a client may pause while it sends its clips."""
    read_timeout_s: Seconds = 120.0
    """Seconds that a client may take to send its request."""
