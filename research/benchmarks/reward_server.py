"""Throughput of a reward behind the server against the same reward in process.

    python research/benchmarks/reward_server.py --milliseconds 50 --clips 8 --frames 16 --side 64
    python research/benchmarks/reward_server.py --slow 20      # and a second server that takes 20 times as long

The reward sleeps for a fixed time a call, which stands for a model on an accelerator: what is measured is what the
server adds (bytes, checksums, HTTP, batching). Server and client share this machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import torch

SERVE = """
import sys, time, torch, uvicorn
from sage_grpo.rewards.serving.server import ServerLimits, create_app
from sage_grpo.types import PartScores

def score(videos, prompts, fps):
    time.sleep({seconds})
    return PartScores({{"level": videos[:, ::8, ::8, ::8].float().mean(dim=(1, 2, 3, 4))}})

app = create_app(score, limits=ServerLimits(max_batch={clips}, max_wait_ms=2))
uvicorn.run(app, port={port}, log_level="error")
"""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_until_up(port: int) -> None:
    """Until the server answers."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.1)
    raise TimeoutError("the server did not start")


def serve(seconds: float, clips: int, port: int) -> subprocess.Popen[bytes]:
    """A server in a process of its own."""
    return subprocess.Popen([sys.executable, "-c", SERVE.format(seconds=seconds, clips=clips, port=port)])


def measure(urls: list[str], videos: torch.Tensor, prompts: list[str], clips: int) -> tuple[torch.Tensor, float]:
    """The scores of all clips, and the seconds that they took after a first request."""
    from sage_grpo.rewards.serving.remote import RemoteReward

    client = RemoteReward(urls=urls, parts=["level"], clips_per_request=clips)
    client(videos[:clips], prompts[:clips], 16.0)
    start = time.perf_counter()
    return client(videos, prompts, 16.0)["level"], time.perf_counter() - start


def main() -> None:
    """Measure and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="time of one call of the reward")
    parser.add_argument("--clips", type=int, default=8, help="clips a call")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--side", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--slow", type=float, default=0.0, help="add a second server, so many times slower")
    options = parser.parse_args()
    seconds, port, slow_port = options.milliseconds / 1000, free_port(), free_port()
    shape = (options.clips * options.batches, options.frames, options.side, options.side, 3)
    videos = torch.randint(0, 256, shape, dtype=torch.uint8)
    prompts = [f"prompt {index}" for index in range(shape[0])]

    def in_process(clips: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        return clips[:, ::8, ::8, ::8].float().mean(dim=(1, 2, 3, 4))

    start = time.perf_counter()
    local = torch.cat([in_process(batch) for batch in videos.split(options.clips)])
    local_time = time.perf_counter() - start
    url = [f"http://127.0.0.1:{port}"]
    slow_url = [f"http://127.0.0.1:{slow_port}"] if options.slow else []
    servers = [serve(seconds, options.clips, port)]
    if options.slow:
        servers.append(serve(options.slow * seconds, options.clips, slow_port))
    try:
        for number in (port, slow_port)[: len(servers)]:
            wait_until_up(number)
        remote, remote_time = measure(url, videos, prompts, options.clips)
        if options.slow:
            both, both_time = measure(url + slow_url, videos, prompts, options.clips)
            assert torch.equal(local, both)
    finally:
        for server in servers:
            server.terminate()
            server.wait()
    assert torch.equal(local, remote)
    size = videos[: options.clips].numel() / 2**20
    print(f"batch of {options.clips} clips, {size:.1f} MiB, {options.milliseconds:g} ms a call")
    print(f"in process {shape[0] / local_time:8.1f} clips/s")
    print(f"server     {shape[0] / remote_time:8.1f} clips/s")
    print(f"ratio      {local_time / remote_time:8.3f}")
    if options.slow:
        print(f"with one {options.slow:g} times slower {shape[0] / both_time:8.1f} clips/s")


if __name__ == "__main__":
    main()
