"""Tiny random checkpoints of every supported pipeline, built wholly in code and saved to disk as a user's would be.

`build(kind, folder, seed=0)` writes a diffusers folder; `KINDS` lists what there is, all with FlowMatchEuler schedulers; "wan_unipc_t2v" is
"wan_t2v" with the scheduler of the published checkpoints. Widths are the smallest that the classes accept. No file is downloaded.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

import tiny_families

KINDS = (
    *("hunyuan15_t2v", "hunyuan15_i2v", "wan_t2v", "wan_i2v"),
    *("wan22_t2v", "wan22_i2v", "wan22_5b_t2v", "wan22_5b_i2v"),
)
VIDEO = {"frames": 5, "height": 32, "width": 32, "fps": 8.0}
"""The clip that every tiny checkpoint is built for (all of them also take others)."""
OTHERS = {
    "ltx": tiny_families.ltx,
    "ltx_timestep": lambda: tiny_families.ltx(timestep=True),
    "flux": tiny_families.flux,
    "flux_plain": lambda: tiny_families.flux(embedded=False),
    "flux2": tiny_families.flux2,
    "flux2_distilled": lambda: tiny_families.flux2(distilled=True),
    "sd3": tiny_families.sd3,
    "sd3_two": lambda: tiny_families.sd3(third=False),
    "qwen_image": tiny_families.qwen_image,
    "z_image": tiny_families.z_image,
}
EDITS = {"qwen_image_edit": lambda: tiny_families.qwen_image(edit=True)}
"""Those that change a picture."""
SOUND = {"ltx2": tiny_families.ltx2, "ltx2_3": lambda: tiny_families.ltx2(newer=True)}
"""Those whose clips have a sound."""
IMAGES = tuple(kind for kind in (*OTHERS, *EDITS) if kind.startswith(("flux", "sd3", "qwen", "z_image")))
"""Those that make pictures: clips of one frame."""
PICTURE = {"height": 16, "width": 16}
VISION = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
"""Of encoders of a picture."""


def build(kind: str, folder: Path | str, *, seed: int = 0, shift: float = 5.0) -> Path:
    """Write a tiny random checkpoint of the given kind to `folder` and return the folder."""
    folder = Path(folder)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        if kind in (others := {**OTHERS, **SOUND, **EDITS}):
            pipeline = others[kind]()
        else:
            pipeline = _hunyuan15(kind, shift) if kind.startswith("hunyuan15") else _wan(kind, shift)
    finally:
        torch.random.set_rng_state(state)
    pipeline.save_pretrained(folder)
    if kind in EDITS:
        tiny_families.qwen_processor(pipeline.tokenizer).image_processor.save_pretrained(folder / "processor")
        index = json.loads((folder / "model_index.json").read_text())
        write(folder / "model_index.json", {**index, "processor": ["transformers", "Qwen2VLProcessor"]})
    (folder / "video.json").write_text(json.dumps({**VIDEO, "frames": 1} if kind in IMAGES else VIDEO))
    return folder


def unipc(shift: float = 3.0, **config: Any) -> Any:
    from diffusers import UniPCMultistepScheduler

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    return UniPCMultistepScheduler(**{**flow, **config})


def variant(source: Path, folder: Path, **components: Any) -> Path:
    """A copy of a checkpoint with other schedulers or guiders; big files are shared with the source."""
    shutil.copytree(source, folder, copy_function=_link)
    index = json.loads((folder / "model_index.json").read_text())
    for name, component in components.items():
        shutil.rmtree(folder / name)
        component.save_pretrained(folder / name)
        index[name] = ["diffusers", type(component).__name__]
    write(folder / "model_index.json", index)
    return folder


def write(file: Path, content: dict[str, Any]) -> None:
    file.unlink()
    file.write_text(json.dumps(content))


def _link(source: str, target: str) -> None:
    os.link(source, target)


def pipeline(folder: Path | str) -> Any:
    """The stock diffusers pipeline of a folder, on the CPU in float32, without its progress bar."""
    from diffusers import DiffusionPipeline

    index = json.loads((Path(folder) / "model_index.json").read_text())
    left_out = [name for name, entry in index.items() if entry == [None, None]]  # diffusers wants to be told
    given: dict[str, Any] = dict.fromkeys(left_out)
    if "processor" in index and "processor" not in given:
        from transformers import AutoTokenizer

        given["processor"] = tiny_families.qwen_processor(AutoTokenizer.from_pretrained(Path(folder) / "tokenizer"))
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **given)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def shared_pipeline(folder: Path) -> Any:
    """The same, loaded once a session for each default dtype: for tests that undo what they do to it."""
    return _kept(folder, torch.get_default_dtype())


@functools.cache
def _kept(folder: Path, dtype: torch.dtype) -> Any:
    return pipeline(folder)


def image(seed: int = 0, height: int = 32, width: int = 32) -> torch.Tensor:
    """A random uint8 picture H x W x 3."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)


def _hunyuan15(kind: str, shift: float) -> Any:
    import diffusers
    from diffusers import AutoencoderKLHunyuanVideo15, ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler
    from diffusers import HunyuanVideo15Transformer3DModel as Transformer
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    channels = 4
    transformer = Transformer(
        in_channels=2 * channels + 1,
        out_channels=channels,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=16,
        text_embed_2_dim=12,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
        target_size=32,
        task_type="i2v" if kind.endswith("i2v") else "t2v",
    )
    tiny_families.wake(transformer)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        downsample_match_channel=False,
        upsample_match_channel=False,
        scaling_factor=1.7,
    )
    qwen = Qwen2_5_VLTextConfig(**{**tiny_families.QWEN25, "intermediate_size": 32, "num_hidden_layers": 4})
    components = {
        "text_encoder": Qwen2_5_VLTextModel(qwen).eval(),
        "tokenizer": qwen_tokenizer(),
        "transformer": transformer,
        "vae": vae.eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=shift),
        "text_encoder_2": tiny_families.t5(12),
        "tokenizer_2": ByT5Tokenizer(),
        "guider": ClassifierFreeGuidance(guidance_scale=3.0),
    }
    if kind.endswith("t2v"):
        return diffusers.HunyuanVideo15Pipeline(**components)
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    return diffusers.HunyuanVideo15ImageToVideoPipeline(
        **components,
        image_encoder=SiglipVisionModel(SiglipVisionConfig(**VISION, num_hidden_layers=1)).eval(),
        feature_extractor=SiglipImageProcessor(size=PICTURE),
    )


def _wan(kind: str, shift: float) -> Any:
    import diffusers
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

    z_dim, vae = 16, tiny_families.wan_vae()
    umt5 = UMT5EncoderModel(UMT5Config(vocab_size=384, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    components: dict[str, Any] = {
        "tokenizer": ByT5Tokenizer(),
        "text_encoder": umt5.eval(),
        "vae": vae,
        "scheduler": unipc(shift) if "unipc" in kind else FlowMatchEulerDiscreteScheduler(shift=shift),
        "transformer": _wan_transformer(kind, z_dim),
    }
    if kind.startswith("wan22") and "5b" not in kind:
        components |= {"transformer_2": _wan_transformer(kind, z_dim), "boundary_ratio": 0.8}
    if kind.endswith("t2v"):
        return diffusers.WanPipeline(**components, expand_timesteps="5b" in kind)
    if kind in ("wan_i2v", "wan_flf2v"):
        from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

        components |= {
            "image_encoder": CLIPVisionModel(CLIPVisionConfig(**VISION, num_hidden_layers=2)).eval(),
            "image_processor": CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=PICTURE),
        }
    return diffusers.WanImageToVideoPipeline(**components, expand_timesteps="5b" in kind)


def _wan_transformer(kind: str, z_dim: int) -> Any:
    from diffusers import WanTransformer3DModel

    two, clip = kind == "wan_flf2v", kind in ("wan_i2v", "wan_flf2v")
    beside = kind.endswith(("i2v", "flf2v")) and "5b" not in kind  # the image goes into channels beside the latents
    return tiny_families.wake(
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=z_dim + (4 + z_dim if beside else 0),
            out_channels=z_dim,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            image_dim=8 if clip else None,
            added_kv_proj_dim=24 if clip else None,
            pos_embed_seq_len=2 * 5 if two else None,
            rope_max_seq_len=32,
        )
    )


def qwen_tokenizer() -> Any:
    """A byte-level tokenizer whose template is as long as the 108 tokens that the pipeline crops."""
    tokenizer = tiny_families.byte_level()
    template = "<|endoftext|>" * 108 + "{{ message['content'] }}" + "<|endoftext|>" * 3
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}" + template + "{% endif %}{% endfor %}"
    )
    return tokenizer
