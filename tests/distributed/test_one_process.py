"""What ranks say to one another, and sharded networks: in one process, by ranks that are threads and by a group of one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from threads import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

from double import CLOSE
from sage_grpo.distributed import context, fsdp, world
from sage_grpo.distributed.context import SequenceParallel
from sage_grpo.distributed.fsdp import Engine, disagreeing, local, shard
from sage_grpo.distributed.spec import Layout, ParallelSpec
from sage_grpo.distributed.world import RankLost, World, start
from sage_grpo.samplers.noise import keyed_noise


@pytest.mark.parametrize(("tokens", "text", "heads", "ranks"), [(7, 5, 6, 3), (5, 1, 2, 2)])
def test_split_attention_is_attention(tokens: int, text: int, heads: int, ranks: int, monkeypatch) -> None:
    """Output and gradients, also where tokens cannot be split evenly, and where a rank has no text at all."""
    sides = Ranks(ranks)
    monkeypatch.setattr(context, "dist", sides)
    x, words = keyed_noise((2, tokens, 3 * heads), "x").double(), keyed_noise((2, text, 3 * heads), "text").double()
    weights = [keyed_noise((9 * heads, 3 * heads), name).double() for name in ("weight", "text weight")]
    weights.append(keyed_noise((3 * heads, 2), "out").double())

    def attention(query, key, value):
        turned = (one.transpose(1, 2) for one in (query, key, value))
        return nn.functional.scaled_dot_product_attention(*turned).transpose(1, 2)

    def attend(rank: int | None):
        own, (of_video, of_text, out) = (x, words), [weight.clone().requires_grad_() for weight in weights]
        split, counts = None, [[tokens], [text]]
        if rank is not None:
            split = SequenceParallel(None)
            split.check(heads)
            own, counts = tuple(map(split.split, own)), [split.counts(tokens), split.counts(text)]
        parts = [(a @ weight.T).unflatten(2, (heads, -1)) for a, weight in zip(own, (of_video, of_text))]
        mine, both = own[0].shape[1], [a + b for a, b in zip(*counts)]
        joint = torch.cat(parts, dim=1).chunk(3, dim=-1)
        attended = attention(*joint) if split is None else split.attend(attention, *joint, both)
        y = attended.flatten(2)[:, :mine] @ out
        y = y if split is None else split.merge(y, tokens)
        (y * keyed_noise(tuple(y.shape), "gradient")).sum().backward()
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in (of_video, of_text, out)]
        return y.detach(), torch.cat([grad.flatten() for grad in grads])

    y, gradients = attend(None)
    found = sides.run(attend)
    for other, _ in found:
        torch.testing.assert_close(other, y, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(sum(own for _, own in found), gradients, rtol=CLOSE, atol=CLOSE)


def test_what_ranks_say_arrives_in_their_order(monkeypatch) -> None:
    sides, layout = Ranks(4), Layout(replicate=2, shard=1, sequence=2)
    monkeypatch.setattr(world, "dist", sides)

    def work(number: int):
        one = World(number // 2, 2, number % 2, layout, control="control", timeout=7.0)
        rows = torch.full((number, 2), float(number))
        return (
            one.gather(rows).tolist(),
            one.sum(torch.tensor([1.0, 10.0]) * number).tolist(),
            (one.any(number == 3), one.any(False)),
            one.texts(f"é{number}" * (number != 1)),
            one.from_main(f"of {number}"),
        )

    rows = [[float(number)] * 2 for number in range(4) for _ in range(number)]
    texts = ["é0", "", "é2", "é3"]
    # Ranks that share a clip say the same: numbers 0 and 2 count.
    assert sides.run(work) == [(rows, [2.0, 20.0], (True, False), texts, "of 0")] * 4
    assert ("control", 7.0, True) in sides.waited


def test_one_process_has_nobody_to_ask() -> None:
    alone, values = World(), torch.tensor([[1.0], [2.0]])
    assert alone.gather(values) is values
    assert alone.sum(values) is values
    assert (alone.any(True), alone.any(False)) == (True, False)
    assert (alone.texts("a"), alone.from_main("b")) == (["a"], "b")
    alone.barrier()
    alone.note("nowhere")
    alone.close()
    assert Engine().scale == 1.0
    assert shard([], ParallelSpec(), alone) == Engine()


@pytest.mark.parametrize(
    ("device", "gpu", "taken"), [("auto", True, True), ("cpu", True, False), ("auto", False, False)]
)
def test_a_process_takes_the_gpu_of_its_place_on_the_machine(device: str, gpu: bool, taken: bool, monkeypatch) -> None:
    chosen, groups = [], []
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "end_with_parent", lambda: None)
    monkeypatch.setattr(world, "rendezvous", lambda place, timeout: iter([(dist.HashStore(), 0, 0)]))
    monkeypatch.setattr(dist, "new_group", lambda *members, **named: None)
    monkeypatch.setattr(world.Heartbeat, "start", lambda *ranks, **named: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **named: groups.append((backend, named["rank"])))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    place = torch.device("cuda", 1) if taken else torch.device("cpu")
    made = start(ParallelSpec(timeout=30.0), device)
    assert (made.number, made.processes, made.device, made.timeout) == (5, 8, place, 30.0)
    assert chosen == [place] * taken
    assert groups == [("cpu:gloo,cuda:nccl" if taken else "gloo", 5)]


def test_only_what_is_not_sharded_is_moved_and_the_mesh_is_of_the_device(monkeypatch) -> None:
    meshes, moved, network = [], [], Net()
    sharding = SimpleNamespace(set_modules_to_backward_prefetch=lambda blocks: None)
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **named: sharding)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: moved.append((self.data_ptr(), device)) or self)
    mesh = SimpleNamespace(device_type="there")
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda kind, sizes, **named: meshes.append((kind, sizes)) or mesh)
    one = World(control="control", device=torch.device("cuda", 0), layout=Layout(replicate=2, shard=3))
    for each in (one, replace(one, device=None, layout=Layout(shard=3))):
        shard([(network, network.blocks)], ParallelSpec(), each, keep=[network.kept])
    assert meshes == [("cuda", (2, 3)), ("cpu", (3,))]
    assert moved == [(one.data_ptr(), "there") for one in (network.shift, network.kept)] * 2


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("\n[gloo] Connection closed by peer\nmore"), True),
        (dist.DistError("anything"), True),
        (RuntimeError("out of memory"), False),
    ],
)
def test_only_a_lost_connection_names_the_missing_rank(error: RuntimeError, lost: bool) -> None:
    class Beat:
        where = ""

        def missing(self) -> str:
            return "Lost rank 1."

    with pytest.raises(RuntimeError) as raised, World(rank=2, heartbeat=Beat()).watching():
        raise error
    first = str(error).strip().splitlines()[0]
    assert str(raised.value) == (f"Lost rank 1.\nThis process (rank 2) got: {first}" if lost else "out of memory")
    assert isinstance(raised.value, RankLost) == lost
    with pytest.raises(RuntimeError) as raised, World().watching():
        raise error
    assert raised.value is error


@pytest.fixture
def group(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**given, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    watched = []
    monkeypatch.setattr(world, "end_with_parent", lambda: watched.append(True))
    made = start(ParallelSpec(timeout=30.0), "cpu")
    assert watched == [True]
    yield made
    made.close()
    assert made.heartbeat._stop.is_set()
    assert not made.heartbeat._thread.is_alive()


class Net(nn.Module):
    """Two blocks; what stays whole, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.kept = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.kept, self.shift * x


def test_a_sharded_network_is_the_network(group) -> None:
    assert (group.processes, group.number, group.is_main, group.device) == (1, 0, True, torch.device("cpu"))
    assert (group.timeout, group.layout, group.sequence_group) == (30.0, Layout(), None)
    assert group.heartbeat.patience == 5.0
    group.note("here")
    assert group.heartbeat.where == "here"
    plain, network, x = Net(), Net(), torch.arange(6.0).view(2, 3)
    engine = shard([(network, network.blocks)], ParallelSpec(sync_every_pass=True), group, keep=[network.kept])
    assert engine == Engine(group, (network,), sync_every_pass=True)
    assert engine.scale == 1.0
    assert replace(engine, world=World(layout=Layout(3, 2, 2))).scale == 12.0
    assert [isinstance(p, DTensor) for p in (network.kept, network.blocks[0].weight)] == [False, True]
    assert not isinstance(local(network.blocks[0].weight), DTensor)
    assert [block._get_fsdp_state()._fsdp_param_group._reshard_after_forward for block in network.blocks] == [True] * 3
    for one in (plain, network):
        sum(part.square().sum() for part in one(x)).backward()
    norm = torch.cat([p.grad.flatten() for p in plain.blocks.parameters()]).norm()
    assert engine.clip_gradients(iter(network.blocks.parameters()), 0.5) == pytest.approx(float(norm), rel=1e-5)
    whole = engine.whole({name: p.grad for name, p in network.blocks.named_parameters()})
    for name, p in plain.blocks.named_parameters():
        torch.testing.assert_close(whole[name], p.grad * 0.5 / norm, rtol=1e-5, atol=1e-7)
    kept = {"w": network.kept}
    assert engine.whole(kept)["w"].data_ptr() != network.kept.data_ptr(), "a copy"
    assert replace(engine, world=World(rank=1)).whole({"w": network.blocks[0].weight}) == {}
    assert disagreeing(dict(network.named_parameters()), group) == []
    with torch.no_grad():
        network(x)
    states = [block._get_fsdp_state()._fsdp_param_group._sharded_state.name for block in network.blocks]
    assert states == ["SHARDED"] * 3, "what stayed gathered would be stale"


def test_weights_are_gathered_as_they_are_computed_with_and_gradients_reduced_in_float32(group) -> None:
    network, seen = Net(), []
    network.blocks[1].register_forward_pre_hook(lambda block, given: seen.append((block.weight.dtype, given[0].dtype)))
    shard([(network, network.blocks)], ParallelSpec(reshard=False, cpu_offload=True), group, compute=torch.bfloat16)
    with torch.no_grad():
        network(torch.ones(2, 3, dtype=torch.bfloat16))
    y = network(torch.ones(2, 3, dtype=torch.bfloat16))[0]
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
    state = network.blocks[1]._get_fsdp_state()._fsdp_param_group
    assert state._sharded_state.name == "UNSHARDED", "reshard is off"
    y.sum().backward()
    assert {p.grad.dtype for p in network.parameters()} == {torch.float32}


def test_a_rank_that_differs_is_named(monkeypatch) -> None:
    rows = {"same": [1.0, 2.0], "other sum": [1.0, 3.0], "other squares": [0.0, 3.0]}

    class Three(World):
        def gather(self, values):
            return torch.tensor([[sum(row), sum(x * x for x in row)] for row in rows.values()], dtype=torch.float64)

    assert disagreeing({"w": torch.tensor([1.0, 2.0])}, Three()) == [1, 2]
