"""Random weights of the real sizes, drawn on the GPU: a Wan folder on disk, HunyuanVideo-1.5 in memory only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # for a tokenizer without files

WAN = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
    "text_dim": 4096,
    "freq_dim": 256,
}
WAN_VAE = {"base_dim": 96, "num_res_blocks": 2, "dim_mult": [1, 2, 4, 4]}
TINY_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "num_layers": 2,
    "text_dim": 16,
    "freq_dim": 16,
}
TINY_WAN_VAE = {"base_dim": 4, "num_res_blocks": 1, "dim_mult": [1, 1, 1, 1]}
TINY_HUNYUAN15 = {
    "in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "num_refiner_layers": 1,
    "mlp_ratio": 2.0, "text_embed_dim": 16, "text_embed_2_dim": 12, "image_embed_dim": 8, "rope_axes_dim": (4, 6, 6), "target_size": 32,
}  # fmt: skip
TINY_HUNYUAN15_VAE = {
    "latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4, "downsample_match_channel": False, "upsample_match_channel": False,
}  # fmt: skip


def device() -> str:
    """Device on which weights are drawn."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype(tiny: bool) -> torch.dtype:
    """Dtype of the networks."""
    return torch.float32 if tiny else torch.bfloat16


def wan(folder: Path, *, tiny: bool) -> Path:
    """Write Wan 2.1 text-to-video, 1.3B, in diffusers' layout unless it is there; the text encoder is small, of the real width."""
    done = folder / "done"
    if done.is_file():
        return folder
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    sizes = TINY_WAN if tiny else WAN
    with torch.device(device()):
        transformer = WanTransformer3DModel(**sizes, in_channels=16, out_channels=16, qk_norm="rms_norm_across_heads")
        vae = AutoencoderKLWan(**(TINY_WAN_VAE if tiny else WAN_VAE), z_dim=16, temperal_downsample=[False, True, True])
        text = UMT5Config(vocab_size=384, d_model=sizes["text_dim"], d_kv=16, d_ff=64, num_layers=1, num_heads=2)
        encoder = UMT5EncoderModel(text)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    WanPipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=encoder.to(dtype(tiny)).eval(),
        vae=vae.eval(),
        scheduler=UniPCMultistepScheduler(**flow),
        transformer=transformer.to(dtype(tiny)),
    ).save_pretrained(folder)
    done.touch()
    return folder


def hunyuan15_transformer(*, tiny: bool) -> Any:
    """The transformer alone."""
    from diffusers import HunyuanVideo15Transformer3DModel

    torch.manual_seed(0)
    with torch.device(device()):
        return _drawn(HunyuanVideo15Transformer3DModel, tiny, task_type="t2v", **(TINY_HUNYUAN15 if tiny else {}))


def hunyuan15(folder: Path, *, tiny: bool) -> Any:
    """A pipeline in memory without text encoders; the folder gets all but the large weights, which stay where they are."""
    from diffusers import AutoencoderKLHunyuanVideo15, ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler
    from diffusers import HunyuanVideo15Pipeline as Pipeline
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    import tiny as tiny_models

    transformer = hunyuan15_transformer(tiny=tiny)
    with torch.device(device()):
        vae = _drawn(AutoencoderKLHunyuanVideo15, tiny, **(TINY_HUNYUAN15_VAE if tiny else {}))
        width, glyphs = transformer.config.text_embed_dim, transformer.config.text_embed_2_dim
        heads, sections = (2, [1, 1, 2]) if tiny else (28, [16, 24, 24])
        text = Qwen2_5_VLTextConfig(
            vocab_size=300,
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=heads,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "mrope_section": sections, "rope_theta": 1e6},
        )
        encoder = _drawn(Qwen2_5_VLTextModel, tiny, text)
        byt5 = _drawn(
            T5EncoderModel, tiny, T5Config(vocab_size=384, d_model=glyphs, d_kv=4, d_ff=64, num_layers=1, num_heads=2)
        )
    parts: dict[str, Any] = {
        "transformer": transformer,
        "vae": vae.eval(),
        "text_encoder": encoder,
        "text_encoder_2": byt5,
    }
    parts |= {"tokenizer": tiny_models.qwen_tokenizer(), "tokenizer_2": ByT5Tokenizer()}
    parts |= {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "guider": ClassifierFreeGuidance(guidance_scale=6.0),
    }
    pipeline = Pipeline(**parts)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        if name in ("transformer", "vae"):
            part.save_config(folder / name)
            (folder / name / "diffusion_pytorch_model.safetensors").touch()  # looked for, not read
        else:
            part.save_pretrained(folder / name)
    pipeline.save_config(folder)
    pipeline.register_modules(text_encoder=None, text_encoder_2=None)
    return pipeline


def _drawn(kind: Any, tiny: bool, *given: Any, **named: Any) -> Any:
    """A module whose weights are drawn in the dtype in which they stay: there is no room for a float32 copy of 8 B of them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype(tiny))
    try:
        return kind(*given, **named)
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    print(json.dumps({"folder": str(wan(Path(sys.argv[1]), tiny="--tiny" in sys.argv))}))
