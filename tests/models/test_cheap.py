"""Passes that nothing is learned from: which steps go without the negative branch, caches that forget, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from diffusers.models.cache_utils import CacheMixin

from sage_grpo.models import ModelError
from sage_grpo.models.cheap import CheapSpec, check_negative
from sage_grpo.models.network.step_cache import check_given

SIGMAS = [1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1]
EXPLORES = [False, False, False, True, False, False, False, False]


def always(sigma: float) -> bool:
    return True


@pytest.mark.parametrize(("interval", "every"), [(None, 2), ((0.2, 0.92), 3), ((0.0, 0.6), 9), ((0.2, 0.92), 1)])
def test_how_steps_are_guided(interval: tuple[float, float] | None, every: int) -> None:
    """Exploring steps are exact; given ones are guided inside the interval alone, and what is reused is younger than `every` and of its own path."""
    found = CheapSpec(guidance=interval, negative_every=every).guides(SIGMAS, EXPLORES, always)
    low, high = interval or (0.0, 1.0)
    assert [guide == "exact" for guide in found] == EXPLORES
    for sigma, guide in zip(SIGMAS, found):
        assert guide == "exact" or (guide == "none") == (not low <= sigma <= high)
    for index, guide in enumerate(found):
        if guide == "reused":
            last = max(place for place in range(index) if found[place] != "reused")
            assert found[last] == "whole"  # neither exact nor before the interval
            assert index - last < every
    if every > 1:  # and no more often than that
        assert ("whole", "whole") not in pairwise(found)


def test_another_expert_adds_its_own_guidance() -> None:
    found = CheapSpec(negative_every=9).guides(SIGMAS, [False] * 8, lambda sigma: sigma > 0.75)
    assert found == ("whole", *["reused"] * 3, "whole", *["reused"] * 3)


FIRST, TAYLOR = CheapSpec(cache="first_block", cache_threshold=1e9), CheapSpec(cache="taylorseer")


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("hunyuan15_t2v", FIRST),
        ("wan_t2v", TAYLOR),
        pytest.param("wan22_t2v", FIRST, marks=pytest.mark.slow),
        pytest.param("ltx", TAYLOR, marks=pytest.mark.slow),
    ],
)
def test_a_cache_leaves_out_blocks_forgets_and_goes_away(kind: str, spec: CheapSpec, model) -> None:
    """After what it must run it does not run its last block; a clip that comes next, and all that comes after, is as if it had never been."""
    one = model(kind, guidance_scale=4.0)
    conditions, x = one.encode(["a cat", "a small dog runs"]), torch.randn(2, *one.latent_shape())
    ran: list[int] = []
    handles = [child.register_forward_hook(lambda *given: ran.append(1)) for child in _inside(one)]
    forwards = [block.forward for block in one.blocks()]

    def path() -> list[torch.Tensor]:
        return [one.velocity(x, torch.tensor(sigma), conditions) for sigma in (0.5, 0.45, 0.4)]

    with torch.no_grad():
        exact = path()
        whole = len(ran)
        with one.cheaply(spec) as forget:
            ran.clear()
            first = path()
            left = len(ran)
            forget()
            again = path()
        after = path()
    for handle in handles:
        handle.remove()
    assert torch.equal(first[0], exact[0])  # nothing to reuse yet
    assert not torch.equal(first[2], exact[2])
    assert left < whole
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, exact, after))
    assert [block.forward for block in one.blocks()] == forwards


def _inside(one) -> list[torch.nn.Module]:
    """A module in the last block of every network: it runs when the block does."""
    return [next(one._blocks_of(network)[-1].children()) for network in (one.transformer, *one.others)]


def test_texts_of_several_lengths_have_caches_of_their_own(model) -> None:
    """Both branches of guidance, and sub-batches of one micro-batch: each reuses what it left itself."""
    one, spec = model("hunyuan15_t2v", guidance_scale=4.0), FIRST
    conditions, x = one.encode(["a cat", "a small dog runs"]), torch.randn(2, *one.latent_shape())
    found = []
    with torch.no_grad():
        for rows in ([0, 1], [0], [1]):
            with one.cheaply(spec):
                path = [one.velocity(x[rows], torch.tensor(s), [conditions[row] for row in rows]) for s in (0.8, 0.7)]
            found.append(path[-1])
    torch.testing.assert_close(found[0], torch.cat(found[1:]), rtol=1e-4, atol=1e-5)


def test_attention_is_another_inside_only(model) -> None:
    one = model("wan_t2v", guidance_scale=1.0)
    before = [block.attn1.processor._attention_backend for block in one.blocks()]
    with one.cheaply(CheapSpec(attention="_native_math")):
        assert {block.attn1.processor._attention_backend.value for block in one.blocks()} == {"_native_math"}
    assert [block.attn1.processor._attention_backend for block in one.blocks()] == before


def test_what_a_network_cannot_do_is_refused(model) -> None:
    """A cache of one block leaves no others out."""
    for kind, spec, words in (
        ("sd3", CheapSpec(cache="first_block"), "diffusers has no caches for SD3Transformer2DModel"),
        ("wan_t2v", CheapSpec(attention="fast"), 'rollout.cheap.attention "fast" is not a backend'),
        ("wan_t2v", CheapSpec(attention="sage_hub"), "fetch code from the hub are not supported"),
        ("sd3", CheapSpec(attention="_native_math"), "PyTorch's own choice only"),
    ):
        with pytest.raises(ModelError, match=words):
            model(kind).check_cheap(spec)
    block = torch.nn.Linear(1, 1)
    check_given(CheapSpec(cache="taylorseer"), [], [block])
    with pytest.raises(ModelError, match="what follows the first block, and there is 1"):
        check_given(CheapSpec(cache="first_block"), [], [block])
    network = type("Odd", (torch.nn.Module, CacheMixin), {})()
    network.odd, network.proj_out = torch.nn.ModuleList([block, torch.nn.Linear(1, 1)]), block
    with pytest.raises(ModelError, match="no caches for Odd"):
        check_given(CheapSpec(cache="taylorseer"), [network], list(network.odd))


def test_no_negative_branch_no_saving() -> None:
    for spec in (CheapSpec(guidance=(0.2, 0.8)), CheapSpec(negative_every=2)):
        with pytest.raises(ModelError, match="this run has none"):
            check_negative(spec, lambda sigma: 1)
        check_negative(spec, lambda sigma: 2 if sigma > 0.5 else 1)  # one of two experts has one
    check_negative(CheapSpec(cache="taylorseer"), lambda sigma: 1)
    with pytest.raises(ValueError, match="is empty: give the lower"):
        CheapSpec(guidance=(0.8, 0.8))
