"""A Ray cluster on loopback in a process of its own (Ray leaves its traces in one): two nodes with room for a run each.

Prints the address; loses the second node when it is told so on stdin, and ends with it.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

from ray.cluster_utils import Cluster

STORE = 100 * 2**20

if __name__ == "__main__":
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    print(cluster.address, flush=True)
    if sys.stdin.readline():
        cluster.remove_node(other, allow_graceful=False)
        sys.stdin.read()
    cluster.shutdown()
