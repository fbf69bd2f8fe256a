"""A clip whose tokens are divided over ranks has the velocity of the whole: here two threads are the ranks, and one has more tokens than the other."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

import tiny
from sage_grpo.models import ModelError


class Ranks:
    def __init__(self) -> None:
        self.box: list[Tensor] = [torch.empty(0)] * 2
        self.barrier = Barrier(2)
        self.attended = [0, 0]

    def gathered(self, rank: int, own: Tensor) -> list[Tensor]:
        self.box[rank] = own
        self.barrier.wait()
        found = list(self.box)
        self.barrier.wait()
        return found


class Rank:
    """One of them, in place of a SequenceParallel; a third of the tokens are the first's."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def check(self, heads: int) -> None:
        if heads % 2:
            raise ModelError(f"{heads} heads")

    def counts(self, total: int) -> list[int]:
        return [total // 3, total - total // 3]

    def split(self, tokens: Tensor, dim: int = 1) -> Tensor:
        return tokens.split(self.counts(tokens.shape[dim]), dim)[self.rank]

    def merge(self, tokens: Tensor, total: int) -> Tensor:
        whole = torch.cat(self.ranks.gathered(self.rank, tokens), 1)
        assert sum(self.counts(total)) == whole.shape[1]
        return whole[:, :total]

    def attend(self, attention, query, key, value, counts) -> Tensor:
        self.ranks.attended[self.rank] += 1
        keys, values = (self.ranks.gathered(self.rank, one) for one in (key, value))
        assert query.shape[1] == counts[self.rank]
        assert [one.shape[1] for one in keys] == [one.shape[1] for one in values] == counts
        return attention(query, torch.cat(keys, 1), torch.cat(values, 1))


@pytest.mark.parametrize(
    ("kind", "calls"),
    [*(("wan22_t2v", 2), ("hunyuan15_t2v", 2)), pytest.param("wan22_5b_i2v", 2, marks=pytest.mark.slow)],
)
def test_two_ranks_make_what_one_makes(kind: str, calls: int, fresh_model) -> None:
    size = {"height": 32, "width": 48}
    models = [fresh_model(kind, guidance_scale=1.0, train=False, **size) for _ in range(2)]
    x = torch.randn(1, *models[0].latent_shape())
    conditions = models[0].encode(["a cat"], [tiny.image(1)] if 0 not in models[0].pictures else None)
    with torch.no_grad():
        expected = [models[0].velocity(x, torch.tensor(sigma), conditions) for sigma in (0.9, 0.3)]
    ranks, found = Ranks(), [[], []]

    def run(rank: int) -> None:
        try:
            models[rank].abilities.split_sequence(Rank(ranks, rank))
            ranks.barrier.wait()
            with torch.no_grad():
                for sigma in (0.9, 0.3):
                    found[rank].append(models[rank].velocity(x, torch.tensor(sigma), conditions))
        except BaseException:
            ranks.barrier.abort()
            raise

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ranks.attended == [2 * calls] * 2
    for own in found:
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_heads_must_be_dealt_out_and_padding_cannot(model, fresh_model) -> None:
    ours = fresh_model("wan22_t2v", guidance_scale=1.0, train=False)
    ours.others[0].register_to_config(num_attention_heads=3)
    with pytest.raises(ModelError, match="3 heads"):
        ours.abilities.split_sequence(Rank(Ranks(), 0))
    ours = model("hunyuan15_t2v", train=False, guidance_scale=1.0, options={"pad_text": 8})
    with pytest.raises(ModelError, match=r"parallel\.sp > 1"):
        ours.abilities.split_sequence(Rank(Ranks(), 0))
