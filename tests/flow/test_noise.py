"""Noise goes by its key alone, and keys give the seeds that they have always given."""

from __future__ import annotations

import hashlib

import torch

from sage_grpo.flow.noise import keyed_noise, keyed_seed


def test_a_seed_is_the_upper_63_bits_of_a_hash_of_its_key() -> None:
    digest = hashlib.blake2b(b"7/3/noise", digest_size=8).digest()
    assert keyed_seed(7, 3, "noise") == int.from_bytes(digest, "little") // 2


def test_keys_differ_and_seeds_fit_a_generator() -> None:
    seeds = {keyed_seed(one, other) for one in range(20) for other in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) >= 2**62


def test_noise_goes_by_its_key() -> None:
    one = keyed_noise((3, 4), 1, "a")
    assert (one.shape, one.dtype) == ((3, 4), torch.float32)
    assert torch.equal(one, keyed_noise((3, 4), 1, "a"))
    assert not torch.equal(one, keyed_noise((3, 4), 1, "b"))
