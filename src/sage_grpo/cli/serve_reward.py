"""Serve rewards over HTTP to a training run on another machine."""

from __future__ import annotations

import os
from dataclasses import field
from typing import Annotated, Literal

from sage_grpo.config.ranges import Range, checked
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.serving import ServerLimits
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.utils.http_server import check_installed, check_port, serve


@checked
class Options:
    """Rewards to serve, and the address."""

    rewards: list[RewardSpec]
    """Rewards to serve; all parts are returned, and the client applies the weights."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines can reach requires a token."""
    port: Annotated[int, Range(0, 65535)] = 8765
    """Port to listen on."""
    token_env: str = "SAGE_GRPO_REWARD_TOKEN"
    """Environment variable with the token that clients must send."""
    device: str = "cpu"
    """Device of the rewards."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    """Queue and sizes."""
    log_level: Literal["critical", "error", "warning", "info"] = "warning"
    """Log level of the HTTP server."""


def run(options: Options) -> int:
    """Serve until SIGINT or SIGTERM; open requests are finished first."""
    check_installed()
    from sage_grpo.models.devices import choose_device
    from sage_grpo.rewards.serving.server import check_binding, composite_scorer, create_app

    token = os.environ.get(options.token_env, "").strip()
    check_binding(options.host, token)
    check_port(options.host, options.port)
    device = choose_device(options.device)
    composite = CompositeReward(options.rewards, device=device, require_weights=False)
    composite.refuse_comparing("a request may hold a part of a group. Name it in the run's own rewards.")
    app = create_app(composite_scorer(composite), token=token, limits=options.limits)
    kept = "with a token" if token else "without a token"
    print(f"Serving {', '.join(composite.names)} on http://{options.host}:{options.port}, {kept}.", flush=True)
    started = serve(
        app,
        header_timeout=options.limits.header_timeout_s,
        max_connections=options.limits.max_connections,
        host=options.host,
        port=options.port,
        log_level=options.log_level,
        timeout_graceful_shutdown=60,
    )
    return 0 if started else 1
