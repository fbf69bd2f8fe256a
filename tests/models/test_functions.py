"""Small functions of models, against values that were worked out by hand."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from torch import nn

import tiny
from sage_grpo.models import ModelError, base, lora
from sage_grpo.models.checkpoints import cache, checkpoint
from sage_grpo.models.checkpoints.files import Header
from sage_grpo.models.devices import autocast, choose_device, load_dtypes, slow_dtype
from sage_grpo.models.families import wan
from sage_grpo.models.families.ltx2 import Ltx2
from sage_grpo.models.guidance import Guidance, token_norm
from sage_grpo.models.lora import EXPERT_KEY
from sage_grpo.models.network.inputs import LatentGrid, check_image, seen_tokens
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.schedulers import scheduler_shift
from sage_grpo.models.spec import AdapterSpec, LoraSpec, ModelSpec, find_family
from sage_grpo.samplers.kernels import Ode, Sage
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.types import VideoSpec


def of(kind: type, **fields):
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


# ---- what is asked for


def test_a_budget_is_gib_or_a_share_of_the_card() -> None:
    budgets = {None: 80.0, 0.5: 40.0, 1.0: 1.0, 30.0: 30.0, 100.0: 80.0}
    assert {given: ModelSpec(memory=given).budget(80.0) for given in budgets} == budgets
    ModelSpec(memory=2.0).check_budget("cuda")
    ModelSpec().check_budget("cpu")
    with pytest.raises(ModelError, match=r"model\.memory 2 "):
        ModelSpec(memory=2.0).check_budget("cpu")


def test_names_of_families(tmp_path, monkeypatch) -> None:
    """One that is far from all may be a module; one without `load` is none. One near a family is a module if that is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wann.py").write_text("def load(spec, device=None): ...")
    assert ModelSpec(family="wann").own_family == "wann"
    with pytest.raises(ModelError, match=r"there is no module nowhere_at_all, .* Families that ship .*hunyuan15"):
        ModelSpec(family="nowhere_at_all").load()
    assert find_family("wan") is wan
    assert [ModelSpec(family=name).own_family for name in ("wan", "far_away", "a.wan")] == [None, "far_away", "a.wan"]
    with pytest.raises(ModelError, match=r'"wanda" is unknown: .*Did you mean .wan'):
        ModelSpec(family="wanda")
    with pytest.raises(ModelError, match=r"no function load\(spec"):
        find_family("math")


def test_a_family_of_ones_own_must_know_sigmas_and_adapters() -> None:
    levels, adapter = [1.0, 0.5], [AdapterSpec(path="x")]
    model = SimpleNamespace(sigmas=lambda steps: torch.tensor([1.0, 0.5, 0.0]))
    for fields in (
        {"family": "my.toy", "sigmas": levels},
        {"family": "my.toy"},
        {"family": "wan", "adapters": adapter},
    ):
        ModelSpec(**fields)._check_heard(model)
    for name, fields in (("sigmas", {"sigmas": [1.0, 0.4]}), ("adapters", {"family": "my.toy", "adapters": adapter})):
        with pytest.raises(ModelError, match=rf"model\.{name}: the family SimpleNamespace"):
            ModelSpec(**fields)._check_heard(model)


def test_devices_and_precisions(monkeypatch) -> None:
    assert [str(choose_device(name)) for name in ("auto", "cpu", torch.device("meta"))] == ["cpu", "cpu", "meta"]
    for name in ("meta", "nonsense", "cuda"):
        with pytest.raises(ModelError, match=name):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(choose_device("cuda:1")) == "cuda:1"
    with pytest.raises(ModelError, match="sees 2 of that kind"):
        choose_device("cuda:2")
    slow = [bool(slow_dtype(dtype, torch.device(at))) for dtype in ("bfloat16", "float32") for at in ("cpu", "cuda")]
    assert slow == [True, False, False, False]
    rough, fine = torch.bfloat16, torch.float32
    for fields, trained in (({}, fine), ({"lora": LoraSpec()}, rough), ({"train": False}, rough)):
        dtypes = load_dtypes(ModelSpec(dtype="bfloat16", **fields), "cpu", trained=("a", "b"))
        assert dtypes == {"default": rough, "a": trained, "b": trained, "vae": fine}


def test_weights_that_are_kept_in_float32_compute_in_bfloat16() -> None:
    others = ({"dtype": "float32"}, {"train": False}, {"lora": LoraSpec()})
    for fields, mixed in (({}, True), *((one, False) for one in others)):
        spec = ModelSpec(**{"dtype": "bfloat16", **fields})
        kind = getattr(torch, spec.dtype)
        ours = of(Ltx2, spec=spec, dtype=kind)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with autocast(spec, torch.device("cpu"), kind):
                assert torch.is_autocast_enabled("cpu") == mixed
        assert ours._input_dtype == (torch.float32 if mixed else kind)


def test_a_random_network_has_the_precisions_of_a_loaded_one(benchmark_module) -> None:
    width = {
        "num_attention_heads": 1,
        "attention_head_dim": 12,
        "num_layers": 1,
        "ffn_dim": 4,
        "text_dim": 4,
        "freq_dim": 4,
    }
    network = benchmark_module("plan_vs_measured").random_network("WanTransformer3DModel", width, torch.bfloat16)
    wide = set(network._keep_in_fp32_modules)
    kept = {name: not wide.isdisjoint(name.split(".")) for name, _ in network.named_parameters()}
    assert set(kept.values()) == {True, False}
    assert {name: p.dtype == torch.float32 for name, p in network.named_parameters()} == kept


# ---- formats, pictures and frames


def test_a_grid_divides_a_clip_and_names_the_nearest_that_can_be_divided() -> None:
    grid = LatentGrid(channels=4, temporal=4, spatial=8, patch=(1, 2, 2))
    assert grid.latents(VideoSpec(frames=9, height=32, width=48)) == (4, 3, 4, 6)
    assert grid.tokens(VideoSpec(frames=9, height=32, width=48)) == 18
    images = LatentGrid(channels=4, temporal=None, spatial=8)
    assert images.latents(VideoSpec(frames=1, height=24, width=48)) == (4, 1, 3, 6)
    for one, sizes, message in (
        (grid, (6, 32, 32), r"4k \+ 1 .* got 6: use 5 or 9\."),
        (grid, (5, 8, 32), r"height must be a multiple of 16 here, got 8: use 16\."),
        (grid, (5, 32, 40), r"width must be a multiple of 16 here, got 40: use 32 or 48\."),
        (images, (5, 24, 24), r"must be 1 for a model of images, got 5"),
    ):
        with pytest.raises(ModelError, match=message):
            one.check(VideoSpec(frames=sizes[0], height=sizes[1], width=sizes[2]))


def test_which_pictures_a_model_takes() -> None:
    one, two = tiny.image(), torch.stack([tiny.image()] * 2)
    check_image(None, {0, 1})
    check_image(one, {1})
    check_image(two, {1, 2})
    for image, pictures, message in (
        (None, {1}, "needs one image per prompt"),
        (one, {0}, "starts from text"),
        (one.float(), {1}, "uint8 H x W x 3"),
        (one[..., :2], {1}, "uint8 H x W x 3"),
        (one[0], {1}, "uint8 H x W x 3"),
        (torch.stack([one] * 3), {1, 2}, "uint8 H x W x 3"),
        (two, {1}, "leave last_image out"),
        (one, {2}, "give the prompt a last_image"),
    ):
        with pytest.raises(ModelError, match=message):
            check_image(image, pictures)


def test_seen_tokens_are_the_valid_ones_or_all() -> None:
    text = torch.arange(8.0).view(4, 2)
    assert torch.equal(seen_tokens(text, torch.tensor([1, 1, 0, 0])), text[:2])
    assert torch.equal(seen_tokens(text, torch.tensor([0, 0, 0, 0])), text)


def test_a_trial_of_wan_has_the_pictures_that_its_network_takes() -> None:
    for length, shape in ((None, (2, 7)), (10, (2, 5, 7))):  # two pictures share the positions
        sizes = {"text_dim": 3, "image_dim": 7, "pos_embed_seq_len": length, "in_channels": 6}
        ours = of(wan.Wan, transformer=SimpleNamespace(config=FrozenDict(sizes)), guidance=Guidance())
        ours.latent_shape = lambda: (4, 1, 2, 5)
        shapes = {name: tuple(one.shape) for name, one in ours._trial_inputs().items()}
        assert shapes == {"text": (2, 3), "image": shape, "condition": (2, 1, 2, 5)}


# ---- noise levels, guidance and experts


def test_a_dynamic_shift_is_a_line_in_the_number_of_tokens() -> None:
    line = {"base_image_seq_len": 4, "max_image_seq_len": 64, "base_shift": 0.5, "max_shift": 1.1}
    dynamic = {**line, "use_dynamic_shifting": True, "time_shift_type": "linear"}
    assert scheduler_shift(dynamic, 34) == pytest.approx(0.8)
    assert scheduler_shift({**dynamic, "time_shift_type": "exponential"}, 34) == pytest.approx(math.exp(0.8))
    found = [scheduler_shift(one, 34) for one in ({"shift": 3.0}, {"flow_shift": 2.0}, {})]
    assert found == [3.0, 2.0, None]


def test_pipelines_that_run_wans_checkpoints() -> None:
    for name in ("WanPipeline", "WanImageToVideoPipeline"):
        assert wan.Wan._pipeline({"_class_name": name}) == name
    assert wan.Wan._pipeline({"_class_name": "WanPipeline", "expand_timesteps": True}) == "WanImageToVideoPipeline"


def test_guidance_by_hand() -> None:
    v, negative = (torch.tensor(one).view(1, 1, 1, 1, 2) for one in ([3.0, -1.0], [1.0, -1.0]))
    assert Guidance().combine(v, negative, 2.0).flatten().tolist() == [5.0, -1.0]
    # The std is 3 / 2 of the conditional one's: half of it goes back.
    found = Guidance(rescale=0.5).combine(v, negative, 2.0).flatten().tolist()
    assert found == pytest.approx([5 * 5 / 6, -5 / 6])
    picture = torch.zeros(1, 2, 1, 2, 4)
    picture[0, 0, 0, 0, 0], picture[0, 1, 0, 1, 1], picture[0, 0, 0, 0, 3] = 3.0, 4.0, 2.0
    assert token_norm(picture, 2)[0, 0, 0].tolist() == [[5.0, 5.0, 2.0, 2.0]] * 2
    doubled = Guidance(renormalize=2).combine(picture, 0.5 * picture.flip(1), 2.0)
    torch.testing.assert_close(token_norm(doubled, 2), token_norm(picture, 2))


# ---- sampling


class Line:
    def __init__(self) -> None:
        self.network, self.others = nn.Identity(), ()

    def velocity(self, x, sigma, conditions, *, guidance=None):
        return torch.full_like(x, 2.0 if guidance is None else guidance)

    def trains(self, sigma) -> bool:
        return sigma >= 0.5


def test_steps_outside_the_window_are_the_ode() -> None:
    schedule, x = Schedule.shifted(4, 5.0).exploring([False, True, False, False]), torch.randn(1, 2)
    policy = Policy(Line(), Sage(0.5), schedule)
    assert [policy.is_noisy(index) for index in range(4)] == [False, True, False, False]
    first, euler = (one.step(0, x, []).gaussian for one in (policy, Policy(Line(), Ode(), schedule)))
    assert float(first.std) == 0
    assert torch.equal(first.mean, euler.mean)
    with pytest.raises(ValueError, match="stochastic"):
        integrate(policy, x, [])


def test_a_whole_schedule() -> None:
    schedule, told = Schedule.shifted(4, 1.0), []
    policy = Policy(Line(), Ode(), schedule, guidance=3.0)
    x = integrate(policy, torch.zeros(1, 2), [], progress=lambda *n: told.append(n))
    assert x.tolist() == [[-3.0, -3.0]]  # one unit of time against the velocity
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    broken, start = Line(), torch.zeros(1, 1)
    broken.velocity = lambda x, sigma, conditions, **_: x if sigma > 0.9 else x / 0
    with pytest.raises(ModelError, match="The sample after step 2 holds NaN"):
        integrate(Policy(broken, Ode(), schedule), start, [])


def test_what_a_model_can_do() -> None:
    """Of two networks the one that trains at sigma 1 is the first; others are asked for what they lack."""
    at = base.network_of(Line())
    assert [at(1.0), at(0.5), at(0.4)] == [0, 0, 1]
    for asked in (base.pixels_of, base.encoder_of):
        with pytest.raises(ModelError, match="Line has no"):
            asked(Line())


# ---- adapters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("to_q", "add_q_proj")})


def test_a_lora_belongs_to_its_expert(tmp_path) -> None:
    for saved, expert, says in (
        ("low", "high", 'low-noise expert, .* into the high-noise .*model.expert to "low".*component="transformer_2"'),
        ("high", "low", 'high-noise expert, .* into the low-noise .*model.expert to "high".*component="transformer"'),
        ("low", None, "low-noise expert of a model with two; this checkpoint has one network"),
    ):
        with pytest.raises(ModelError, match=says):
            lora._check_expert(Header({}, {}, {EXPERT_KEY: saved}), tmp_path, expert)
        lora._check_expert(Header({}, {}, {EXPERT_KEY: saved}), tmp_path, saved)
        lora._check_expert(Header({}, {}, {}), tmp_path, expert)


# ---- files and keys


def test_parts_of_a_key_do_not_run_together_and_the_folder_is_the_users(tmp_path, monkeypatch) -> None:
    assert len({cache.digest(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("c", "ab"))}) == 4
    assert str(cache.default_folder()).endswith("cache/sage-grpo/conditioning")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / ".cache" / "sage-grpo" / "conditioning"


def test_where_a_checkpoint_is(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    fetched = []
    monkeypatch.setattr(checkpoint, "_download", lambda spec: fetched.append(spec.path))
    checkpoint.resolve(ModelSpec(path="owner/scenes"))
    checkpoint.resolve(ModelSpec(path="owner/name"))
    assert fetched == ["owner/scenes", "owner/name"]
    none = "is not a folder"
    for path, says in (("scenes", none), ("./name", none), ("a/b/c", none)):
        with pytest.raises(ModelError, match=says):
            checkpoint.resolve(ModelSpec(path=path))
