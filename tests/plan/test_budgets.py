"""A budget of memory: what fits in it is kept, the process is held to it, and a plan says what each size costs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sage_grpo.models import ModelError
from sage_grpo.models.spec import ModelSpec
from sage_grpo.plan import hardware, show
from sage_grpo.plan.costs import forecast
from sage_grpo.plan.description import describe
from sage_grpo.plan.formulas import COMPUTE, GIB, HUNYUAN15, HUNYUAN15_VAE, MASTER, RunShape, differentiating_memory
from sage_grpo.recipes import recipe
from sage_grpo.recipes.targets import using
from sage_grpo.run.preflight import preflight
from sage_grpo.samplers.windows import Window
from sage_grpo.training import offload
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.offload import VaeMover, hold_to_budget

H200 = hardware.find("h200")


def budgeted(name: str, memory: float | None, **update: object) -> TrainConfig:
    config = recipe(name)
    return replace(config, model=replace(config.model, memory=memory), update=replace(config.update, **update))


@pytest.mark.parametrize(("asked", "gib"), [(None, 100.0), (24.0, 24.0), (0.25, 25.0), (1.0, 1.0), (300.0, 100.0)])
def test_a_number_is_gib_and_below_one_a_share_and_never_more_than_there_is(asked: float | None, gib: float) -> None:
    assert ModelSpec(memory=asked).budget(100.0) == gib


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """What PyTorch is told of a card of 100 GiB; like PyTorch it takes a number, and no device without one."""
    told: list[tuple[float, int]] = []

    def hold(share: float, device: int | torch.device) -> None:
        index = device if isinstance(device, int) else device.index
        if index is None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        told.append((share, index))

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", hold)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(offload, "_held", set())
    return told


def test_a_process_is_held_to_its_budget_and_let_go_by_a_later_run_without_one(card) -> None:
    device = torch.device("cuda", 0)
    hold_to_budget(ModelSpec(), device)
    assert card == []
    for memory in (24.0, 0.5, 500.0):
        hold_to_budget(ModelSpec(memory=memory), device)
    hold_to_budget(ModelSpec(), torch.device("cuda", 1))
    hold_to_budget(ModelSpec(), device)
    hold_to_budget(ModelSpec(), device)
    assert card == [(0.24, 0), (0.5, 0), (1.0, 0), (1.0, 0)]


def test_a_gpu_without_a_number_is_the_one_that_the_process_is_on(card) -> None:
    for memory in (24.0, None):
        hold_to_budget(ModelSpec(memory=memory), torch.device("cuda"))
    assert card == [(0.24, 3), (1.0, 3)]


def test_a_budget_on_a_cpu_is_refused_before_anything_is_loaded() -> None:
    config = TrainConfig(model=ModelSpec(device="cpu", memory=24.0))
    with pytest.raises(ModelError, match=r"model\.memory 24 is a budget of a GPU's memory"):
        preflight(config)


def test_the_vae_stays_only_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 GiB of 100 are enough for it to stay; in a budget of 60 they are not."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * GIB)
    for memory, stays in ((None, True), (80.0, True), (60.0, False), (0.6, False)):
        mover = VaeMover(SimpleNamespace(device=torch.device("cuda")), ModelSpec(memory=memory))
        mover.bytes = 2 * GIB
        mover.observe({"time/peak_gib_update": 60.0})
        assert mover.stays == stays, memory


def test_smaller_chunks_make_decoding_fit() -> None:
    """Of 4 latent frames or of one: what is decoded at once shrinks as much; what goes from one chunk to the next does not, and nothing else changes."""
    config = recipe("hunyuan15_lora/branch")
    phases = []
    for options in ({}, {"decode_chunk": 4}, {"decode_chunk": 1}):
        said = forecast(replace(config, model=replace(config.model, options=options)), H200)
        phases.append(next(phase for phase in said.phases if phase.name == "decode"))
    past = HUNYUAN15_VAE.past * 352 * 624
    sizes = [phase.memory.activations - past for phase in phases]
    assert sizes[0] == sizes[1] == pytest.approx(4 * sizes[2])  # 4 M pixels are 4 latent frames of 352 x 624
    assert sizes[2] > 0
    brief = replace(config, model=replace(config.model, frames=13))  # one chunk: nothing is carried
    decode = next(phase for phase in forecast(brief, H200).phases if phase.name == "decode")
    assert decode.memory.activations == pytest.approx(HUNYUAN15_VAE.working * 13 * 352 * 624)
    assert len({phase.seconds for phase in phases}) == 1


def test_a_plan_prices_guided_training_without_the_negatives_gradient() -> None:
    """A backward pass of two less, and the activations of one branch; rollouts and evaluations stay as they are."""
    whole = forecast(budgeted("hunyuan15_lora/sage", None, gradient_checkpointing=True), H200)
    config = replace(whole.config, model=replace(whole.config.model, negative_gradient=False))
    found = whole.architecture
    half, plain = forecast(config, H200, architecture=found), {phase.name: phase for phase in whole.phases}
    cheaper = {phase.name: phase for phase in half.phases}
    assert half.passes == whole.passes
    (row,) = whole.passes
    forward, backward = whole._pass(row["replay"]), whole._pass(row["replay"], backward=True)
    saved = plain["update"].seconds - cheaper["update"].seconds
    assert saved == pytest.approx((backward - forward) / 2)
    for name in ("rollout", "decode", "reward"):
        assert cheaper[name].seconds == plain[name].seconds
    assert half.evaluation_seconds == whole.evaluation_seconds
    assert cheaper["update"].memory.activations < plain["update"].memory.activations
    unguided = replace(whole.config, model=replace(whole.config.model, guidance_in_training=False))
    without = [replace(unguided, model=replace(unguided.model, negative_gradient=one)) for one in (True, False)]
    assert len({forecast(one, H200, architecture=found).iteration_seconds for one in without}) == 1


def test_decoding_with_a_graph_keeps_a_chunk_and_the_pasts_of_runs() -> None:
    job, vae = RunShape(frames=13), HUNYUAN15_VAE  # 4 latent frames
    area = job.height * job.width
    for at_once, pixels, pasts in ((1, 4, 4), (8 * area, 8, 3), (2**40, 13, 0)):
        network = replace(HUNYUAN15, vae=replace(vae, graph_pixels=at_once))
        kept = (vae.graph * pixels + vae.past * pasts) * area * job.vae_bytes / COMPUTE + 2 * 3 * MASTER * 13 * area
        assert differentiating_memory(network, job).activations == pytest.approx(kept)


@pytest.mark.parametrize(
    ("window", "one"),
    [({"kind": "fixed", "start": 0, "length": 2}, True), ({"kind": "sliding", "length": 2}, False),
     ({"kind": "random", "length": 2}, False), ({"kind": "drawn", "at": [1]}, True), ({"kind": "drawn"}, False)],
)  # fmt: skip
def test_several_iterations_are_looked_at_where_windows_move(window: dict, one: bool) -> None:
    config = recipe("shapes/sage")
    once = replace(config.update, updates_per_rollout=1)
    config = replace(config, rollout=replace(config.rollout, window=Window(**window)), update=once)
    plans = describe(config).plans
    assert (len(plans) == 1) == one
    assert plans[0].iteration == 0


@pytest.mark.parametrize(
    ("name", "gib", "options"),
    [
        ("sd35", 24, {}),
        ("flux", 48, {}),
        ("qwen_image", 48, {}),
        ("wan22_5b", 48, {}),
        ("wan22_5b", 24, {"model.frames": 61}),
    ],
)
@pytest.mark.parametrize("method", ["branch", "sage"])
def test_targets_fit_the_gpus_that_the_page_names(name: str, gib: float, options: dict, method: str) -> None:
    if (gib, method, name) == (24, "sage", "wan22_5b"):
        options = {**options, "rollout.offload": True}
    config = using(recipe(f"{name}/{method}"), options)
    fits = [forecast(config, replace(hardware.find("h100"), gib=size)).fits for size in (gib, 80.0)]
    assert fits == [True, True]


def test_small_clips_of_wan_22_5b_are_pointed_out() -> None:
    config = using(recipe("wan22_5b"), {"model.height": 256, "model.width": 256})
    assert "256 x 256 leaves 64 tokens for four frames" in describe(config).size_advice()
    assert describe(config).size_advice() in show.short(forecast(config, H200))
    assert not describe(using(config, {"model.height": 480, "model.width": 832})).size_advice()
    assert not describe(using(recipe("wan"), {"model.height": 256, "model.width": 256})).size_advice()
