"""Which files a built-in reward reads, and where they come from: so that all that is missing is said at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sage_grpo.rewards.spec import RewardSpec


@dataclass(frozen=True)
class Need:
    """Something on disk that an option names."""

    key: str
    """The option, as errors call it."""
    value: str
    source: str
    """Where it comes from."""
    hub: str = ""
    """A file of it by which to find it in the hub's cache; empty where only a path will do."""
    repo: str = ""
    """The repository on the hub that a folder at this path is a copy of."""
    pinned: bool = False
    """Whether a name on the hub needs its commit (owner/name@COMMIT): without one, owner/name is a folder."""

    @property
    def is_hub_id(self) -> bool:
        """Whether the value can be a name on the hub: owner/name, and no path."""
        named = self.value.count("/") == 1 and not self.value.startswith((".", "/", "~"))
        return bool(self.hub) and named and ("@" in self.value or not self.pinned)

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, as a path or in the hub's cache."""
        if Path(self.value).expanduser().exists():
            return True
        if not self.is_hub_id:
            return False
        from huggingface_hub import try_to_load_from_cache

        repo, _, revision = self.value.partition("@")
        return isinstance(try_to_load_from_cache(repo, self.hub, revision=revision or None), str)


_CLIP = "a CLIP model in transformers' format, a folder or a hub name (openai/clip-vit-large-patch14)"
_DINO = "a DINO or DINOv2 model in transformers' format, a folder or a hub name (facebook/dino-vitb16 is VBench's)"
_QWEN = "Qwen2-VL-2B-Instruct: hf download Qwen/Qwen2-VL-2B-Instruct, or its hub name"
SOURCES: dict[str, dict[str, tuple[str, str]]] = {
    "videoalign": {
        "checkpoint": (
            "the authors' release: hf download KwaiVGI/VideoReward --local-dir {value}, or sage-grpo download",
            "model_config.json",
        ),
        "base": (_QWEN, "config.json"),
        "template": ("prompt_template.py of https://github.com/KwaiVGI/VideoAlign", ""),
    },
    "clip": {"model": (_CLIP, "config.json"), "tokenizer": (_CLIP, "config.json")},
    "pickscore": {"model": ("a hub name (yuvalkirstain/PickScore_v1) or a folder with it", "config.json")},
    "aesthetic": {
        "model": (_CLIP, "config.json"),
        "head": ("the layers of an aesthetic predictor, as safetensors or .pth", ""),
    },
    "hpsv2": {
        "checkpoint": ("HPS_v2.1_compressed.pt of xswu/HPSv2 as safetensors: docs/rewards.md says how", ""),
        "base": (
            "configuration and tokenizer: hub name laion/CLIP-ViT-H-14-laion2B-s32B-b79K, or a folder",
            "config.json",
        ),
    },
    "hpsv3": {
        "checkpoint": ("HPSv3.safetensors: hf download MizzenAI/HPSv3 HPSv3.safetensors", ""),
        "base": ("configuration and tokenizer: hub name Qwen/Qwen2-VL-7B-Instruct, or a folder", "config.json"),
        "template": ("hpsv3/dataset/data_collator_qwen.py of https://github.com/MizzenAI/HPSv3", ""),
    },
    "imagereward": {
        "checkpoint": ("ImageReward.pt of THUDM/ImageReward as safetensors: docs/rewards.md says how", ""),
        "config": ("med_config.json of THUDM/ImageReward", ""),
        "tokenizer": ("BERT's: hub name google-bert/bert-base-uncased, or a folder", "tokenizer.json"),
    },
    "subject_consistency": {"model": (_DINO, "config.json")},
    "background_consistency": {"model": (f"{_CLIP}; openai/clip-vit-base-patch32 is VBench's", "config.json")},
}
"""Reward -> option -> where its file comes from, and the file by which to find it in the hub's cache."""

REPOSITORIES = {("videoalign", "checkpoint"): "KwaiVGI/VideoReward"}
"""Folders that `sage-grpo download` can make."""


def reward_needs(spec: RewardSpec) -> Iterator[Need]:
    """The files that the options of a reward name."""
    for option, (source, hub) in SOURCES.get(spec.name, {}).items():
        value = spec.options.get(option)
        if isinstance(value, str) and value:
            repo = REPOSITORIES.get((spec.name, option), "")
            yield Need(
                f"rewards {spec.title}: {option}", value, source.format(value=value), hub, repo, pinned=bool(repo)
            )
