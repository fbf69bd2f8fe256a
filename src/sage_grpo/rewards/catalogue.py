"""Every reward that comes with the package, in words, and whether one is ready on this machine; nothing is loaded for it."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass

from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.needs import SOURCES, reward_needs
from sage_grpo.rewards.spec import BUILT_IN, RewardSpec, find_reward


@dataclass(frozen=True, kw_only=True)
class About:
    """What one should know before choosing a reward."""

    what: str
    """What it measures."""
    parts: str
    """What it returns."""
    gigabytes: float = 0.0
    """GPU memory of the weights at their default precision with the model that is named first; activations come on top."""
    extra: str = ""
    """Optional dependencies, as `pip install "sage-grpo[EXTRA]"`."""
    module: str = ""
    """What that installs."""
    network: str = ""
    """What leaves the machine, and where to."""
    licence: str = "part of this project"
    """Of the weights, as far as known; their own pages decide."""


CATALOGUE: Mapping[str, About] = {
    "videoalign": About(
        what="visual quality, motion quality and text alignment of whole clips (VideoAlign)",
        parts="VQ, MQ, TA, Overall",
        gigabytes=4.4,
        licence="KwaiVGI/VideoReward: see its page; Qwen2-VL-2B: Apache-2.0",
    ),
    "clip": About(
        what="CLIPScore of frames and prompt", parts="CLIPScore", gigabytes=1.7, licence="OpenAI's CLIP: MIT"
    ),
    "pickscore": About(
        what="PickScore of frames and prompt", parts="PickScore", gigabytes=3.9, licence="PickScore_v1: see its page"
    ),
    "aesthetic": About(
        what="an aesthetic head on CLIP's embedding of frames",
        parts="Aesthetic",
        gigabytes=1.7,
        licence="OpenAI's CLIP: MIT; the head: see its page",
    ),
    "hpsv2": About(
        what="HPSv2 or HPSv2.1, human preference of frames given the prompt",
        parts="HPSv2",
        gigabytes=3.9,
        licence="xswu/HPSv2: Apache-2.0",
    ),
    "hpsv3": About(
        what="HPSv3, human preference of frames given the prompt",
        parts="HPSv3",
        gigabytes=15.5,
        licence="MizzenAI/HPSv3: MIT; Qwen2-VL-7B: Apache-2.0",
    ),
    "imagereward": About(
        what="ImageReward, human preference of frames given the prompt",
        parts="ImageReward",
        gigabytes=1.8,
        licence="THUDM/ImageReward: Apache-2.0",
    ),
    "subject_consistency": About(
        what="VBench's formula on DINO: does the subject stay the same?",
        parts="subject_consistency",
        gigabytes=0.4,
        licence="DINO: Apache-2.0",
    ),
    "background_consistency": About(
        what="VBench's formula on CLIP: does the scene stay the same?",
        parts="background_consistency",
        gigabytes=0.6,
        licence="OpenAI's CLIP: MIT",
    ),
    "video_stats": About(
        what="measurements without weights, and guards against reward hacking",
        parts="sharpness, saturation, brightness, colour_entropy, motion, flicker, warp_error, "
        "midframe_error, duplicate_frames",
    ),
    "ocr": About(
        what="how well frames show the text that the prompt quotes",
        parts="OCR",
        extra="ocr",
        module="rapidocr_onnxruntime",
        licence="rapidocr: Apache-2.0",
    ),
    "remote": About(
        what="rewards that sage-grpo serve-reward hosts elsewhere",
        parts="those of the server that have weights",
        network="clips and prompts go to options.urls",
        licence="those of the server's rewards",
    ),
    "vlm_judge": About(
        what="a prompted vision-language model at an OpenAI-compatible endpoint",
        parts="visual_quality, motion_quality, text_alignment, or your own dimensions",
        network="frames and prompts go to options.url, which may cost money",
        licence="the endpoint's terms",
    ),
    "shapes": About(
        what="the judge of the embedded shapes world",
        parts="VQ, MQ, TA, Overall, drift, and TA/NAME of every attribute",
    ),
    "shapes_proxy": About(what="a naive proxy in the shapes world that can be hacked", parts="proxy"),
}


@dataclass(frozen=True)
class Readiness:
    """What stands between a reward and its first score."""

    missing: tuple[str, ...] = ()
    """What has to be done first."""
    downloads: tuple[str, ...] = ()
    """What would come from the hub by itself."""
    notes: tuple[str, ...] = ()
    """What could not be looked at."""

    @property
    def ready(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    def describe(self) -> str:
        """In one line."""
        words = [*self.missing, *(f"downloads {name}" for name in self.downloads), *self.notes]
        return "; ".join(words) or "ready"


def needed_options(name: str) -> list[str]:
    """Options of a built-in reward that have no default."""
    parameters = inspect.signature(find_reward(RewardSpec(name=name))).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.KEYWORD_ONLY]


def sources(name: str) -> dict[str, str]:
    """Files that a built-in reward reads: option -> where it comes from."""
    return {option: source.format(value="FOLDER") for option, (source, _) in SOURCES.get(name, {}).items()}


def readiness(spec: RewardSpec) -> Readiness:
    """Whether a reward of a configuration can be loaded here, as far as that shows without loading it."""
    if ":" in spec.name:
        return Readiness(notes=(f"own code ({spec.name}): train and evaluate try it out",))
    if spec.name not in BUILT_IN:
        try:
            find_reward(spec)  # refuses it with the nearest name
        except RewardConfigError as error:
            return Readiness(missing=(str(error),))
        return Readiness(notes=("an object of the Python API",))
    missing = [f"needs the option {name}" for name in needed_options(spec.name) if name not in spec.options]
    about = CATALOGUE[spec.name]
    if about.module and importlib.util.find_spec(about.module) is None:
        missing.append(f'pip install "sage-grpo[{about.extra}]"')
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    downloads = []
    for need in reward_needs(spec):
        if need.is_here:
            continue
        if need.is_hub_id and not offline:
            downloads.append(need.value)
        else:
            missing.append(f"{need.key.partition(': ')[2]} {need.value} is missing ({need.source})")
    key = str(spec.options.get("key_env", "")) if spec.name == "vlm_judge" else ""
    if key and not os.environ.get(key, "").strip():
        missing.append("the environment variable that key_env names is empty")  # unnamed: it may be the key itself
    notes = ("the server is asked when it is tried out",) if about.network else ()
    return Readiness(tuple(missing), tuple(dict.fromkeys(downloads)), notes)
