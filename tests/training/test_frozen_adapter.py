"""A run on a model with a frozen adapter: it is part of the base, and only the trained one moves."""

from __future__ import annotations

from dataclasses import replace

import torch

from sage_grpo.models.spec import AdapterSpec, LoraSpec
from sage_grpo.training.config import BatchConfig
from trainer_helpers import weights_of

OWN = {"lora": LoraSpec(rank=2, targets=["to_v"])}


def test_ratios_begin_at_one_and_the_base_has_the_adapter(make_config, make_trainer, tmp_path):
    small = {"kind": "wan_t2v", "rollout": {"steps": 3}, "batch": BatchConfig(prompts=1, group_size=2, micro_batch=2)}
    turbo = replace(make_config(model={"lora": LoraSpec(rank=2, targets=["to_q"])}, **small).model).load("cpu")
    turbo.save(tmp_path / "turbo", weights={name: 0.3 * torch.ones_like(p) for name, p in turbo.trainable().items()})
    adapters = [AdapterSpec(path=str(tmp_path / "turbo"))]
    trainer = make_trainer(make_config(model={**OWN, "adapters": adapters}, **small))
    plain = make_trainer(make_config(model=OWN, **small))
    before, frozen = weights_of(trainer), {n: p.clone() for n, p in trainer.model.transformer.named_parameters()}
    assert any(not torch.equal(p, plain.model.transformer.get_parameter(name)) for name, p in frozen.items())
    assert trainer.step()["ratio/first_log"] == 0.0
    moved = [name for name, p in trainer.model.transformer.named_parameters() if not torch.equal(p, frozen[name])]
    assert moved
    assert all(".lora_" in name and "to_v" in name for name in moved)
    assert any(not torch.equal(p, before[name]) for name, p in weights_of(trainer).items())
