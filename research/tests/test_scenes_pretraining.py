"""Laws of the scenes world's pretraining: data keep their promises, a short run learns and saves a pipeline."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from research.pretraining.imperfect import Clips
from research.pretraining.pretrain import Maker, pretrain
from research.pretraining.scenes import stages
from research.pretraining.scenes.imperfect import CLIPS, misnamed
from research.pretraining.scenes.options import PretrainOptions
from research.pretraining.scenes.pretrain import MAKER
from research.scenes.render import render
from research.scenes.scene import ATTRIBUTES, random_scenes
from sage_grpo.config.parsing import ConfigError

CPU = torch.device("cpu")
STEPS = {"vae_steps": 2, "flow_steps": 2, "vae_batch": 2, "flow_batch": 8, "vae_clips": 4, "flow_clips": 16}
SIZES = {"latent_channels": 4, "vae_channels": "4,4,8", "heads": 1, "blocks": 1}
TINY = PretrainOptions(**STEPS, **SIZES, score_prompts=0, report_seconds=1000, device="cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Maker:
    """The same stages on 5 frames of 16 x 16."""
    clips = Clips(random_scenes=random_scenes, render=render, frames=5, side=16, rough=CLIPS.rough)
    for name, value in {"CLIPS": clips, "FRAMES": 5, "SIDE": 16}.items():
        monkeypatch.setattr(stages, name, value)
    return replace(MAKER, clips=clips)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a pipeline folder."""
    files = {path.relative_to(folder): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
    return {f"{file}/{name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def test_captions_are_wrong_about_as_often_as_asked_and_never_held_out() -> None:
    scenes = random_scenes(1500, torch.Generator().manual_seed(0), split="train").scenes()
    draw = random.Random(0)
    pairs = [(scene, misnamed(scene, 0.2, draw)) for scene in scenes]
    assert not any(other.heldout for _, other in pairs)
    assert all((one.relation == "alone") == (other.relation == "alone") for one, other in pairs)
    second = [(one, other) for one, other in pairs if one.relation != "alone"]
    attributes = dict.fromkeys(("place", "camera", "kind", "colour", "texture", "verb"), (0.12, pairs))
    attributes |= dict.fromkeys(("relation", "other_kind", "other_colour"), (0.08, second))
    for name, (least, some) in attributes.items():
        wrong = sum(getattr(one, name) != getattr(other, name) for one, other in some) / len(some)
        assert least < wrong < 0.24, name


def test_the_command_makes_a_pipeline_and_scores_it(tmp_path: Path) -> None:
    from diffusers import WanPipeline

    from research.pretraining.scenes.__main__ import Options, run

    tiny = replace(TINY, out=tmp_path / "new", score_prompts=1, score_steps=1)
    assert run(Options(action="pretrain", pretrain=tiny)) == 0
    folder = tmp_path / "new" / "pipeline"
    pipe = WanPipeline.from_pretrained(folder)
    call = {"num_frames": 17, "height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 1.0}
    video = pipe("a striped red ball rolls right in a meadow", **call, output_type="pt").frames
    assert video.shape == (1, 17, 3, 64, 64)
    assert torch.isfinite(video).all()
    card = (folder / "README.md").read_text()
    assert all(f"| TA/{name} |" in card for name in ATTRIBUTES)
    assert "python -m research.pretraining.scenes pretrain --pretrain.out DIR --pretrain.vae_steps 2" in card
    assert str(tmp_path) not in "".join(path.read_text() for path in folder.rglob("*.json"))
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {".json", ".safetensors", ".md"}

    out = tmp_path / "scores"
    assert run(Options(action="score", model=folder, out=out, prompts=1, steps=1)) == 0
    assert json.loads((out / "scores.json").read_text())["ceiling"]["Overall"] > 1.5
    assert run(Options(action="render", out=out, prompts=1)) == 0
    assert {path.name for path in out.iterdir()} >= {"samples.png", "scores.json", "renders.png"}
    with pytest.raises(FileNotFoundError, match="scenes score needs --model FOLDER"):
        run(Options(action="score", out=out))


def test_a_smaller_model_begins_with_some_blocks_of_a_larger_one(small: Maker, tmp_path: Path) -> None:
    """The first and the last block, and all that is not a block; other sizes are refused before anything is trained."""
    large = replace(TINY, blocks=4, out=tmp_path / "large")
    assert pretrain(large, small) == 0
    start = tmp_path / "large" / "pipeline"
    fewer = replace(TINY, blocks=2, start=start, vae=start, out=tmp_path / "fewer")
    network, _ = small.start(fewer) or pytest.fail("There is something to start from.")
    trained = weights(start / "transformer")
    (file,) = {name.rpartition("/")[0] for name in trained}
    for name, tensor in network.state_dict().items():
        source = name.replace("blocks.1.", "blocks.3.")
        assert torch.equal(tensor.half(), trained[f"{file}/{source}"]), name
    assert pretrain(fewer, small) == 0
    found = json.loads((tmp_path / "fewer" / "pipeline" / "transformer" / "config.json").read_text())
    assert found["num_layers"] == 2
    for wrong, told in (
        ({"blocks": 5}, "has 4 blocks, --pretrain.blocks asks for 5"),
        ({"heads": 2}, "--pretrain.heads"),
    ):
        with pytest.raises(ConfigError, match=told):
            pretrain(replace(fewer, vae=None, out=tmp_path / "refused", **wrong), small)
        assert not (tmp_path / "refused" / "vae").exists()
    with pytest.raises(FileNotFoundError, match=r"pipeline/vae is no pipeline folder"):
        pretrain(replace(fewer, start=start / "vae", vae=None, out=tmp_path / "refused"), small)
