"""Tiny random checkpoints of the other families, as tests/tiny.py builds them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

SCHEDULER = {"shift": 3.0}
TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Of text encoders."""
QWEN25 = {
    **{**TEXT, "vocab_size": 300, "max_position_embeddings": 2048},
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
}
"""Of Qwen 2.5 VL, which Qwen-Image and HunyuanVideo 1.5 have."""
CROSS = {
    **{"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2},
    **{"cross_attention_dim": 24, "caption_channels": 16},
}
"""Of transformers that see the prompt by cross attention."""
JOINT = {"num_attention_heads": 2, "num_layers": 2, "num_single_layers": 2}
"""Of transformers in which the prompt is tokens among others, first apart and then together."""
IMAGE_VAE = {
    **{"latent_channels": 4, "block_out_channels": (4, 4), "layers_per_block": 1, "norm_num_groups": 2},
    **{"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
}
DYNAMIC = {
    **{"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64},
    **{"base_shift": 0.9, "max_shift": 2.0},
}
"""A shift that differs visibly between 4 tokens and 64."""


def ltx(timestep: bool = False) -> Any:
    """LTX-Video with the dynamic, stretched grid of the published checkpoints."""
    from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel

    transformer = LTXVideoTransformer3DModel(in_channels=8, out_channels=8, **CROSS)
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False),
        timestep_conditioning=timestep,
        patch_size=2,
        scaling_factor=1.3,
        encoder_causal=True,
        decoder_causal=False,
    )
    for name, parameter in vae.named_parameters():
        if "per_channel_scale" in name:  # how loud the decoder's own noise is; zero as it comes
            torch.nn.init.uniform_(parameter, 0.5, 1.0)
    vae.latents_mean.copy_(torch.randn(8))
    vae.latents_std.copy_(torch.rand(8) + 0.5)
    return LTXPipeline(
        scheduler=_euler(shift_terminal=0.1, **DYNAMIC),
        vae=vae.eval(),
        text_encoder=t5(16),
        tokenizer=_bytes(),
        transformer=wake(transformer),
    )


def ltx2(newer: bool = False) -> Any:
    """LTX-2: video and sound; `newer` as 2.3, with gates, modulated prompts, attention that can be perturbed and a vocoder that widens the band."""
    from diffusers import AutoencoderKLLTX2Audio, LTX2Pipeline, LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    gates = {"gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True}
    late = {**gates, "perturbed_attn": True, "use_prompt_embeddings": False, "rope_type": "split"}
    transformer = LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        vae_scale_factors=(4, 16, 16),
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        **{**CROSS, **(late if newer else {})},
    )
    heads = {"attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": 32}
    connectors = LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=3,
        **{f"{kind}_connector_{key}": value for kind in ("video", "audio") for key, value in heads.items()},
        video_connector_num_attention_heads=3 if newer else 2,
        audio_connector_num_attention_heads=2,
        rope_type="split" if newer else "interleaved",
        per_modality_projections=newer,
        video_hidden_dim=24,
        audio_hidden_dim=16,
    )
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=2,
        mel_bins=8,
        sample_rate=1600,
        mel_hop_length=10,
    )
    audio_vae.latents_mean.copy_(torch.randn(4))
    audio_vae.latents_std.copy_(torch.rand(4) + 0.5)
    layers = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1]]}
    up = {"upsample_kernel_sizes": [4, 11], "upsample_factors": [2, 5]}
    if newer:
        vocoder = LTX2VocoderWithBWE(
            **{"in_channels": 16, "hidden_channels": 8, **up, **layers},
            **{"bwe_in_channels": 16, "bwe_hidden_channels": 8, "bwe_upsample_kernel_sizes": [12, 11]},
            **{"bwe_upsample_factors": [6, 5], **{f"bwe_{key}": value for key, value in layers.items()}},
            **{"filter_length": 32, "hop_length": 10, "window_length": 32, "num_mel_channels": 8},
            **{"input_sampling_rate": 1600, "output_sampling_rate": 4800},
        )
    else:
        vocoder = LTX2Vocoder(in_channels=16, hidden_channels=8, **up, **layers, output_sampling_rate=1600)
    text = {**TEXT, "vocab_size": 384, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 8}
    vision = {
        **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": 28, "patch_size": 14},
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return LTX2Pipeline(
        scheduler=_euler(shift_terminal=0.1, **DYNAMIC),
        vae=_ltx2_vae(8).eval(),
        audio_vae=audio_vae.eval(),
        text_encoder=Gemma3ForConditionalGeneration(config).eval(),
        tokenizer=_bytes(),
        connectors=wake(connectors).eval(),
        transformer=wake(transformer),
        vocoder=wake(vocoder).eval(),
    )


def flux(embedded: bool = True) -> Any:
    """FLUX.1: dev with the guidance input and a dynamic shift, or schnell without both."""
    from diffusers import FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    transformer = FluxTransformer2DModel(
        in_channels=16,
        attention_head_dim=10,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        guidance_embeds=embedded,
        axes_dims_rope=(2, 4, 4),
        **JOINT,
    )
    return FluxPipeline(
        scheduler=_euler(**(DYNAMIC if embedded else SCHEDULER)),
        vae=_image_vae(),
        text_encoder=CLIPTextModel(_clip(8)).eval(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=t5(16),
        tokenizer_2=_bytes(),
        transformer=wake(transformer),
    )


def flux2(distilled: bool = False) -> Any:
    """FLUX.2 klein. Its text is read off layers 9, 18 and 27 of the encoder."""
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    transformer = Flux2Transformer2DModel(
        in_channels=16,
        attention_head_dim=16,
        joint_attention_dim=24,
        timestep_guidance_channels=16,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
        **JOINT,
    )
    vae = AutoencoderKLFlux2(**IMAGE_VAE)
    vae.bn.running_mean.copy_(torch.randn(16))
    vae.bn.running_var.copy_(torch.rand(16) + 0.5)
    qwen = Qwen3Config(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=27,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
    )
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ messages[0]['content'] }}."
    return Flux2KleinPipeline(
        scheduler=_euler(**DYNAMIC),
        vae=vae.eval(),
        text_encoder=Qwen3ForCausalLM(qwen).eval(),
        tokenizer=tokenizer,
        transformer=wake(transformer),
        is_distilled=distilled,
    )


def sd3(third: bool = True) -> Any:
    """Stable Diffusion 3.5 with one layer of two attentions, as in its medium size; its third text encoder may be left out."""
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=12,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    clips = [CLIPTextModelWithProjection(_clip(8)).eval() for _ in range(2)]
    return StableDiffusion3Pipeline(
        transformer=wake(transformer),
        scheduler=_euler(**SCHEDULER),
        vae=_image_vae(),
        text_encoder=clips[0],
        tokenizer=_clip_tokenizer(),
        text_encoder_2=clips[1],
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=t5(16) if third else None,
        tokenizer_3=_bytes() if third else None,
    )


def qwen_image(edit: bool = False) -> Any:
    from diffusers import QwenImageEditPipeline, QwenImagePipeline, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    transformer = QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=10,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(2, 4, 4),
    )
    vae = wan_vae("AutoencoderKLQwenImage")
    text = {**QWEN25, "num_hidden_layers": 1}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16}
    names, none = ("image_pad", "video_pad", "vision_start", "vision_end"), {"processor": None} if edit else {}
    marks = [f"<|{name}|>" for name in names] if edit else []
    components: dict[str, Any] = {
        "scheduler": _euler(**DYNAMIC),
        "vae": vae.eval(),
        "tokenizer": byte_level(),
        "transformer": wake(transformer),
    }
    kind = QwenImageEditPipeline if edit else QwenImagePipeline
    bare = kind(**components, text_encoder=None, **none)
    before = bare.prompt_template_encode.split("<|vision_start|>" if edit else "{}")[0]
    tokenizer = _template_tokenizer(before, bare.prompt_template_encode_start_idx)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(keys, tokenizer.convert_tokens_to_ids(marks)))
    config = Qwen2_5_VLConfig(text_config={**text, "vocab_size": 400 if edit else 300}, vision_config=vision, **ids)
    components |= {"text_encoder": Qwen2_5_VLForConditionalGeneration(config).eval(), "tokenizer": tokenizer}
    return kind(**components, **none)


def qwen_processor(tokenizer: Any) -> Any:
    """transformers' own, but for the videos, for which its constructor asks for torchvision."""
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor: Any = object.__new__(Qwen2VLProcessor)
    processor.image_processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    processor.tokenizer, processor.video_processor, processor.chat_template = tokenizer, None, None
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.image_token_id, processor.video_token_id = tokenizer.convert_tokens_to_ids(
        [processor.image_token, processor.video_token]
    )
    return processor


def z_image() -> Any:
    from diffusers import ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=24,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 4, 4],
        axes_lens=[600, 64, 64],
    )
    qwen = Qwen3Config(**TEXT, vocab_size=300, num_hidden_layers=2, head_dim=8, max_position_embeddings=512)
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ messages[0]['content'] }}."
    return ZImagePipeline(
        scheduler=_euler(**DYNAMIC),
        vae=_image_vae(),
        text_encoder=Qwen3Model(qwen).eval(),
        tokenizer=tokenizer,
        transformer=wake(transformer),
    )


def wan_vae(kind: str = "AutoencoderKLWan") -> Any:
    import diffusers

    small = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return getattr(diffusers, kind)(**small, temperal_downsample=[False, True, True]).eval()


def _ltx2_vae(channels: int) -> Any:
    """Published: 8 frames and 32 pixels a side to a latent; here 4 and 16."""
    from diffusers import AutoencoderKLLTX2Video

    vae = AutoencoderKLLTX2Video(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        downsample_type=("spatial", "temporal", "spatiotemporal", "spatial"),
        upsample_type=("spatial", "spatiotemporal", "spatiotemporal"),
        patch_size=2,
        spatial_compression_ratio=16,
        temporal_compression_ratio=4,
    )
    vae.latents_mean.copy_(torch.randn(channels))
    vae.latents_std.copy_(torch.rand(channels) + 0.5)
    return vae


def _euler(**config: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**config)


def _image_vae() -> Any:
    from diffusers import AutoencoderKL

    shape = {"scaling_factor": 1.5, "shift_factor": 0.1, "use_quant_conv": False, "use_post_quant_conv": False}
    return AutoencoderKL(**IMAGE_VAE, **shape).eval()


def t5(width: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=384, d_model=width, d_kv=4, d_ff=16, num_layers=1, num_heads=2)).eval()


def _bytes() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def _clip(width: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=514,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=width,
        max_position_embeddings=77,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )


def _clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = list(bytes_to_unicode().values())
    symbols += [f"{symbol}</w>" for symbol in symbols] + ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def byte_level() -> Any:
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {symbol: index for index, symbol in enumerate(bytes_to_unicode().values())}
    end = "<|endoftext|>"
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=end, pad_token=end, eos_token=end, padding_side="right"
    )


def _template_tokenizer(before: str, count: int) -> Any:
    """A byte-level tokenizer that reads a template's beginning as so many tokens, which the pipeline then crops."""
    from transformers import AddedToken

    tokenizer = byte_level()
    ends = [round(len(before) * place / count) for place in range(count + 1)]
    pieces = dict.fromkeys(before[start:end] for start, end in pairwise(ends))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return tokenizer


def wake(network: torch.nn.Module, gain: float = 1.5) -> torch.nn.Module:
    """Make a random network's output depend visibly on every input: as they come they are nearly silent; too loud, they multiply round-off."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(gain) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return network
