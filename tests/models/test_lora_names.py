"""LoRAs under other programs' names, which are held as data, and products that are the merged weights'.

program_layers.json has the Linear layers in the blocks of the programs' own models, as their loaders name them: ComfyUI's model_lora_keys_unet, the
networks of sd-scripts and musubi-tuner, and LightX2V's LoRALoader. Diffusers' converters of original weights are a second witness.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import diffusers.loaders.single_file_utils as original
import pytest
import torch
from safetensors.torch import load_file
from test_lora_files import moved

from sage_grpo.cli.main import main
from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.lora_names import PROGRAMS, named, rename, save_lora_for
from sage_grpo.models.lora import ADAPTER
from sage_grpo.models.spec import LoraSpec
from sage_grpo.tools.convert import to_diffusers

LORA = LoraSpec(rank=2, alpha=3.0)
B, S = "transformer_blocks.0.", "single_transformer_blocks.0."
QKV = [f"{B}attn.to_{x}" for x in "qkv"]
ADDED = [f"{B}attn.add_{x}_proj" for x in "qkv"]
EXPECTED = {
    ("wan_t2v", "comfy"): {
        "diffusion_model.blocks.0.self_attn.q": ["blocks.0.attn1.to_q"],
        "diffusion_model.blocks.0.cross_attn.o": ["blocks.0.attn2.to_out.0"],
        "diffusion_model.blocks.0.ffn.0": ["blocks.0.ffn.net.0.proj"],
    },
    ("wan_i2v", "kohya"): {
        "lora_unet_blocks_0_cross_attn_v": ["blocks.0.attn2.to_v"],
        "lora_unet_blocks_0_ffn_2": ["blocks.0.ffn.net.2"],
    },
    ("wan_t2v", "lightx2v"): {"blocks.1.self_attn.o": ["blocks.1.attn1.to_out.0"]},
    ("hunyuan15_t2v", "comfy"): {
        "diffusion_model.double_blocks.0.img_attn.qkv": QKV,
        "diffusion_model.double_blocks.0.txt_attn.qkv": ADDED,
        "diffusion_model.double_blocks.0.txt_attn.proj": [f"{B}attn.to_add_out"],
        "diffusion_model.double_blocks.0.img_mlp.2": [f"{B}ff.net.2"],
    },
    ("hunyuan15_t2v", "kohya"): {
        "lora_unet_double_blocks_0_img_attn_q": QKV[:1],
        "lora_unet_double_blocks_0_txt_mlp_fc1": [f"{B}ff_context.net.0.proj"],
    },
    ("flux", "comfy"): {
        "diffusion_model.double_blocks.0.img_attn.qkv": QKV,
        "diffusion_model.single_blocks.0.linear1": [*(f"{S}attn.to_{x}" for x in "qkv"), f"{S}proj_mlp"],
        "diffusion_model.single_blocks.0.linear2": [f"{S}proj_out"],
    },
    ("flux", "kohya"): {"lora_unet_double_blocks_0_txt_attn_qkv": ADDED},
    ("flux2", "comfy"): {
        "diffusion_model.double_blocks.0.img_attn.qkv": QKV,
        "diffusion_model.double_blocks.0.txt_mlp.0": [f"{B}ff_context.linear_in"],
        "diffusion_model.single_blocks.0.linear1": [f"{S}attn.to_qkv_mlp_proj"],
    },
    ("flux2", "kohya"): {"lora_unet_single_blocks_0_linear2": [f"{S}attn.to_out"]},
    ("sd3", "comfy"): {
        "diffusion_model.joint_blocks.0.x_block.attn.qkv": QKV,
        "diffusion_model.joint_blocks.0.context_block.mlp.fc1": [f"{B}ff_context.net.0.proj"],
    },
    ("sd3", "kohya"): {"lora_unet_joint_blocks_0_context_block_attn_qkv": ADDED},
    ("z_image", "comfy"): {
        "diffusion_model.layers.0.attention.qkv": [f"layers.0.attention.to_{x}" for x in "qkv"],
        "diffusion_model.layers.0.attention.out": ["layers.0.attention.to_out.0"],
    },
    ("z_image", "kohya"): {"lora_unet_layers_0_attention_to_out_0": ["layers.0.attention.to_out.0"]},
    ("qwen_image", "comfy"): {f"diffusion_model.{B}img_mlp.net.0.proj": [f"{B}img_mlp.net.0.proj"]},
    ("qwen_image", "lightx2v"): {f"{B}attn.to_q": QKV[:1]},
    ("ltx", "comfy"): {f"diffusion_model.{B}attn1.to_out.0": [f"{B}attn1.to_out.0"]},
    ("ltx2", "comfy"): {f"diffusion_model.{B}audio_attn1.to_q": [f"{B}audio_attn1.to_q"]},
    ("ltx2", "lightx2v"): {f"{B}attn2.to_k": [f"{B}attn2.to_k"]},
}


LAYERS = json.loads(Path(__file__).with_name("program_layers.json").read_text())
UNTRAINED = re.compile("mod|_img$|x_block.attn2")
"""Layers of the programs that a LoRA has not by default: modulation, what sees a picture, and the second attention of SD3.5 medium."""
KINDS = {"wan": "wan_t2v", "hunyuan15": "hunyuan15_t2v"}
SAME = {"qwen_image_edit": "qwen_image"}


@pytest.fixture
def saved(fresh_model, tmp_path):
    def get(kind: str, program: str, **fields):
        ours = moved(fresh_model(kind, lora=LoraSpec(rank=2, alpha=3.0, **fields)))
        (file,) = save_lora_for(program, tmp_path, ours, {})
        return ours, load_file(file)

    return get


def updates(network) -> dict[str, torch.Tensor]:
    """What the LoRA adds to each of diffusers' layers."""
    named = {name: one.detach() for name, one in network.named_parameters()}
    ends = [name.removesuffix(f".lora_A.{ADAPTER}.weight") for name in named if f".lora_A.{ADAPTER}" in name]
    return {
        end: 1.5 * named[f"{end}.lora_B.{ADAPTER}.weight"] @ named[f"{end}.lora_A.{ADAPTER}.weight"] for end in ends
    }


def products(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a program adds to its layers by a file: alpha / rank * up @ down."""
    stems = [name.removesuffix(".lora_down.weight") for name in tensors if name.endswith(".lora_down.weight")]
    assert len(tensors) == 3 * len(stems)
    found = {}
    for stem in stems:
        down, up = tensors[f"{stem}.lora_down.weight"], tensors[f"{stem}.lora_up.weight"]
        found[stem] = tensors[f"{stem}.alpha"].item() / len(down) * up @ down
    return found


@pytest.mark.parametrize(("kind", "program"), EXPECTED, ids=lambda value: value)
def test_a_program_adds_what_the_merged_weights_have(kind: str, program: str, saved) -> None:
    ours, tensors = saved(kind, program)
    theirs, mine = products(tensors), updates(ours.transformer)
    for name, parts in EXPECTED[kind, program].items():
        torch.testing.assert_close(theirs[name], torch.cat([mine[part] for part in parts]), rtol=1e-6, atol=1e-6)
    total = sum(float(update.square().sum()) for update in mine.values())
    assert sum(float(update.square().sum()) for update in theirs.values()) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(("program", "family"), [(p, f) for p, known in PROGRAMS.items() for f in known])
def test_the_names_are_those_of_the_programs_layers(program: str, family: str, saved) -> None:
    names = {
        re.sub(r"([._])\d+([._])", r"\1#\2", name, count=1)
        for name in products(saved(KINDS.get(family, family), program)[1])
    }
    blocks = LAYERS[program][SAME.get(family, family)]
    layers = {f"{block}{end}" for block, ends in blocks.items() for end in ends}
    assert names <= layers
    assert all(UNTRAINED.search(name) for name in layers - names), layers - names


class Weights(dict):
    """Original weights in which everything that has no LoRA is zero; as long as what diffusers' converter of FLUX.1 splits."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.zeros(7 * 3072)

    def pop(self, name: str) -> torch.Tensor:
        return super().pop(name, self.__missing__(name))


def assert_converted(merged: dict[str, torch.Tensor], mine: dict[str, torch.Tensor]) -> None:
    assert merged.keys() >= {f"{name}.weight" for name in mine}
    for name, tensor in merged.items():
        update = mine.get(name.removesuffix(".weight"), torch.zeros_like(tensor))
        torch.testing.assert_close(tensor, update, rtol=1e-6, atol=1e-6)


def fused_hunyuan(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of HunyuanVideo, whose layers ComfyUI has under other names too."""
    for ours, theirs in (("_attn.", "_attn_"), ("mlp.0", "mlp.fc1"), ("mlp.2", "mlp.fc2"), ("mod.lin", "mod.linear")):
        weights = {name.replace(ours, theirs): tensor for name, tensor in weights.items()}
    return original.convert_hunyuan_video_transformer_to_diffusers(weights)


def split_hunyuan(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    layers = {f"double_blocks.{n}.{end}" for n in range(9) for end in HY}
    dotted = {f"lora_unet_{layer.replace('.', '_')}.weight": f"{layer}.weight" for layer in layers}
    return to_diffusers({dotted[name]: tensor for name, tensor in weights.items()})


EVERY = ["attn*", "ff*"]
CONVERTERS = {
    "wan_i2v": ("comfy", EVERY, original.convert_wan_transformer_to_diffusers),
    "ltx": ("comfy", [], original.convert_ltx_transformer_checkpoint_to_diffusers),
    "ltx2": ("comfy", [], original.convert_ltx2_transformer_to_diffusers),
    "flux2": ("comfy", [], original.convert_flux2_transformer_checkpoint_to_diffusers),
    "sd3": ("comfy", EVERY, original.convert_sd3_transformer_checkpoint_to_diffusers),
    "z_image": (
        "comfy",
        ["*attention.to_*", "*feed_forward.w*"],
        original.convert_z_image_transformer_checkpoint_to_diffusers,
    ),
    "hunyuan15_i2v": ("comfy", [*EVERY, "norm1*"], fused_hunyuan),
    "hunyuan15_t2v": ("kohya", [], split_hunyuan),
}


@pytest.mark.parametrize("kind", CONVERTERS)
def test_original_weights_with_the_lora_are_the_merged_ones(kind: str, saved) -> None:
    """By diffusers' converters of original weights, and by ours of HunyuanVideo-1.5: the update of every layer arrives at its layer."""
    program, targets, convert = CONVERTERS[kind]
    ours, tensors = saved(kind, program, targets=targets)
    weights = {f"{name.removeprefix('diffusion_model.')}.weight": one for name, one in products(tensors).items()}
    assert_converted(convert(Weights(weights) if kind == "sd3" else weights), updates(ours.transformer))


def test_original_weights_of_flux_at_their_own_width_have_the_lora(model) -> None:
    """Diffusers' converter of FLUX.1 has the widths of the published model."""
    flux = model("flux", train=False)
    inside = re.compile(r"(single_)?transformer_blocks\.0\.")
    linear = [
        n for n, layer in flux.transformer.named_modules() if isinstance(layer, torch.nn.Linear) and inside.match(n)
    ]
    sizes = {name: 3072 * (4 if name.endswith("proj_mlp") else 1) for name in [*linear, "proj_out"]}
    halves = {name: (torch.randn(2, 3), torch.randn(size, 2)) for name, size in sizes.items()}
    theirs = products(named("comfy", rename("comfy", "flux", halves, sizes, flux.traits.blocks), 1.5))
    weights = Weights({f"{name.removeprefix('diffusion_model.')}.weight": one for name, one in theirs.items()})
    merged = original.convert_flux_transformer_checkpoint_to_diffusers(weights)
    assert len(linear) == 20
    assert_converted(merged, {name: 1.5 * up @ down for name, (down, up) in halves.items()})


HY = [f"{s}_{end}" for s in ("img", "txt") for end in ("attn_q", "attn_k", "attn_v", "attn_proj", "mlp.fc1", "mlp.fc2")]


@pytest.mark.parametrize(("kind", "program"), [("wan_t2v", "comfy"), ("wan_t2v", "kohya"), ("qwen_image", "comfy")])
def test_stock_diffusers_reads_the_file(kind: str, program: str, saved, fresh_model, tmp_path) -> None:
    ours, _ = saved(kind, program)
    stock = fresh_model(kind, train=False)
    stock.pipe.load_lora_weights(str(tmp_path), weight_name=f"lora_{program}.safetensors", adapter_name=ADAPTER)
    mine = updates(ours.transformer)
    layers = dict(stock.transformer.named_modules())
    for name, update in mine.items():
        layer = layers[name]
        torch.testing.assert_close(layer.get_delta_weight(ADAPTER), update, rtol=1e-5, atol=1e-6)


def test_parts_of_a_stack_without_a_lora_stay_as_they_are(saved) -> None:
    ours, tensors = saved("flux", "comfy", targets=["attn.to_k", "proj_mlp"])
    theirs, mine = products(tensors), updates(ours.transformer)
    zero = torch.zeros_like(mine[f"{B}attn.to_k"])
    assert torch.equal(theirs["diffusion_model.double_blocks.0.img_attn.qkv"], torch.cat([zero, mine[QKV[1]], zero]))
    whole = theirs["diffusion_model.single_blocks.0.linear1"]
    assert torch.equal(whole[-len(mine[f"{S}proj_mlp"]) :], mine[f"{S}proj_mlp"])
    assert torch.equal(whole[len(zero) : 2 * len(zero)], mine[f"{S}attn.to_k"])


def test_the_pictures_of_wan_have_keys_and_values_of_their_own(saved) -> None:
    ours, tensors = saved("wan_i2v", "kohya", targets=["add_k_proj"])
    theirs, mine = products(tensors), updates(ours.transformer)
    assert torch.equal(theirs["lora_unet_blocks_1_cross_attn_k_img"], mine["blocks.1.attn2.add_k_proj"])


def test_two_experts_are_two_files_and_weights_replace_parameters(fresh_model, tmp_path) -> None:
    ours = fresh_model("wan22_t2v", lora=LORA, expert="both")
    name = f"blocks.0.attn1.to_q.lora_B.{ADAPTER}.weight"
    other = torch.ones_like(ours.trainable()[f"transformer_2.{name}"])
    files = save_lora_for("comfy", tmp_path, ours, {f"transformer_2.{name}": other})
    assert [file.name for file in files] == ["lora_comfy_high_noise.safetensors", "lora_comfy_low_noise.safetensors"]
    up = [load_file(file)["diffusion_model.blocks.0.self_attn.q.lora_up.weight"] for file in files]
    assert not up[0].any()
    assert torch.equal(up[1], other)


@pytest.mark.parametrize("expert", ["low", "both"])
def test_experts_of_peft_are_folders_of_the_networks_they_are_for(expert: str, fresh_model, tmp_path) -> None:
    files = save_lora_for("peft", tmp_path, fresh_model("wan22_t2v", lora=LORA, expert=expert), {})
    assert [file.parent.name for file in files] == ["transformer", "transformer_2"][-len(files) :]
    assert len(files) == 1 + (expert == "both")


@pytest.mark.parametrize(
    "kind",
    [
        "wan_t2v",
        *(
            pytest.param(KINDS.get(family, family), marks=pytest.mark.slow)
            for family in PROGRAMS["comfy"]
            if family != "wan"
        ),
    ],
)
def test_peft_loads_its_folder(kind: str, fresh_model, tmp_path) -> None:
    from peft import PeftModel

    ours = moved(fresh_model(kind, lora=LORA))
    save_lora_for("peft", tmp_path, ours, {})
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 3.0
    loaded = PeftModel.from_pretrained(fresh_model(kind, train=False).transformer, str(tmp_path))
    layers = dict(loaded.base_model.model.named_modules())
    for name, update in updates(ours.transformer).items():
        torch.testing.assert_close(layers[name].get_delta_weight(ADAPTER), update, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "program", "targets", "why"),
    [
        (
            "ltx",
            "kohya",
            [],
            "kohya's programs would not load a LoRA of ltx. For it, --format is diffusers, peft, comfy",
        ),
        ("ltx", "lightx2v", [], "LightX2V would not load"),
        ("hunyuan15_t2v", "lightx2v", [], "LightX2V would not load .* peft, comfy, kohya"),
        ("flux2", "lightx2v", [], "LightX2V would not load"),
        (
            "sd3",
            "comfy",
            ["norm1.linear"],
            r"ComfyUI: no place for the LoRA of transformer_blocks\.#\.norm1\.linear in sd3",
        ),
        ("flux", "kohya", ["proj_out"], "kohya's programs: no place for the LoRA of proj_out in flux"),
        ("z_image", "kohya", ["*refiner.*"], "no place for the LoRA of context_refiner"),
    ],
)
def test_what_a_program_cannot_load_is_refused_by_name(
    kind: str, program: str, targets: list[str], why: str, fresh_model, tmp_path: Path
) -> None:
    ours = fresh_model(kind, lora=LoraSpec(rank=2, targets=targets))
    with pytest.raises(ModelError, match=why):
        save_lora_for(program, tmp_path / "out", ours, {})
    assert not (tmp_path / "out").exists()


def test_every_family_has_a_program() -> None:
    assert set().union(*PROGRAMS.values()) >= {
        "wan",
        "hunyuan15",
        "ltx",
        "ltx2",
        "flux",
        "flux2",
        "sd3",
        "z_image",
        "qwen_image",
    }


@pytest.mark.slow
def test_a_trained_run_of_wan_becomes_a_file_of_comfyuis_names(checkpoint, tmp_path: Path) -> None:
    """The path of docs/guides/wan-one-gpu.md on a tiny checkpoint."""
    (tmp_path / "prompts.txt").write_text("a boat on a stream\n")
    small = "--model.height 32 --model.width 32 --model.frames 5 --iterations 1 --batch.prompts 1 --batch.group_size 2"
    small += " --rollout.steps 3 --evaluate.every 0 --model.lora.rank 2 --model.dtype float32 --log.progress false"
    rewards = '[{"name": "video_stats", "weights": {"motion": 1.0, "flicker": -2.0}}]'
    words = ["train", "wan/branch", "--model.path", str(checkpoint("wan_t2v")), "--rewards", rewards, *small.split()]
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main([*words, "--data.prompts", str(tmp_path / "prompts.txt"), "--out", run]) == 0
    assert main(["export", "--run", run, "--format", "comfy", "--out", out]) == 0
    names = {
        name.rpartition(".lora_")[0] or name.removesuffix(".alpha")
        for name in load_file(f"{out}/lora_comfy.safetensors")
    }
    attention = [f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"]
    assert names == {
        f"diffusion_model.blocks.{block}.{part}" for block in (0, 1) for part in [*attention, "ffn.0", "ffn.2"]
    }
