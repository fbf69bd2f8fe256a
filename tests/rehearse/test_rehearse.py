"""`sage-grpo rehearse`: sizes, files, refusals, and whole rehearsals with tiny networks."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sage_grpo.cli.main import main
from sage_grpo.config.parsing import ConfigError
from sage_grpo.models.spec import AdapterSpec, LoraSpec
from sage_grpo.plan import hardware
from sage_grpo.plan.formulas import GIB, Memory
from sage_grpo.recipes import recipe
from sage_grpo.recipes.targets import using
from sage_grpo.rewards.spec import RewardSpec, load_reward
from sage_grpo.tools.rehearse import rehearsal as rehearse
from sage_grpo.tools.rehearse import weights as random_networks
from sage_grpo.tools.rehearse.rewards import random_reward
from sage_grpo.tools.rehearse.weights import RandomNumbers, make_tokenizer

FREE = {"name": "video_stats", "weights": {"brightness": 1.0}}
WAN = {"transformer": 1_418_996_800, "vae": 126_892_531, "text_encoder": 5_680_910_336}
QWEN2_VL = 2_208_985_600
JUDGE = {"base": QWEN2_VL, "VideoReward": QWEN2_VL}
PUBLISHED = {
    "wan/branch": {**WAN, **JUDGE},
    "hunyuan15_lora/branch": {
        **{"transformer": 8_326_608_160, "vae": 1_260_634_115, "text_encoder": 7_070_619_136},
        **{"text_encoder_2": 217_657_472, **JUDGE},
    },
    "ltx2/branch": {
        **{"transformer": 18_876_174_592, "vae": 1_222_479_601, "text_encoder": 12_202_563_392, "vocoder": 55_592_802},
        **{"connectors": 1_431_475_200, "audio_vae": 53_248_146, "1-clap": 153_492_890, **JUDGE},
    },
}
PHASES = [
    "write",
    "train",
    "encode",
    "rollout",
    "decode",
    "reward",
    "update",
    "iteration 1",
    "evaluate",
    "resume",
    "iteration 2",
    "export",
    "stock",
]
"""Rows of a rehearsal whose model has a VAE and a reward."""


def prepare(name: str, folder: Path, options: dict | None = None, *, small: bool = True) -> rehearse.Rehearsal:
    return rehearse.prepare(using(recipe(name), options or {}), folder, small=small)


@pytest.mark.parametrize(
    "name", ["wan/branch", *(pytest.param(name, marks=pytest.mark.slow) for name in list(PUBLISHED)[1:])]
)
def test_random_weights_have_the_published_sizes(name: str, tmp_path: Path) -> None:
    found = prepare(name, tmp_path / "new", small=False)
    assert {part.folder.name: part.parameters for part in found.parts} == PUBLISHED[name]
    for part in found.parts:  # shared ones once
        assert sum(one.numel() for one in part.tensors().values() if isinstance(one, nn.Parameter)) == part.parameters
    assert not (tmp_path / "new").exists()
    written, run = found.disk()
    assert written == 2 * sum(PUBLISHED[name].values())
    assert 0.5 * GIB < run < 30 * GIB  # a LoRA's checkpoints and exports


def test_the_5b_model_has_its_own_vae_and_rewards_their_sizes(tmp_path: Path) -> None:
    found = prepare("wan/branch", tmp_path, {"model.path": "Wan-AI/Wan2.2-TI2V-5B-Diffusers"}, small=False)
    assert [part.parameters for part in found.networks[:2]] == [4_999_787_712, 704_688_668]
    for name, size in (("clip", 427_616_513), ("pickscore", 986_109_441)):
        assert [part.parameters for part in random_reward(RewardSpec(name=name), tmp_path, small=False)[1]] == [size]


def test_weights_keep_the_size_of_a_signal() -> None:
    numbers, empty = RandomNumbers(torch.bfloat16), torch.empty
    matrix = numbers.weights("to_q.weight", empty(300, 400, 2))
    assert matrix.dtype == torch.bfloat16
    assert float(matrix.float().std()) == pytest.approx(800**-0.5, rel=0.02)
    assert not torch.equal(matrix, numbers.weights("to_k.weight", empty(300, 400, 2)))
    for name, shape, value in (
        ("norm.weight", (7,), 1),
        ("norm.gamma", (7, 1, 1), 1),
        ("a.bias", (7,), 0),
        ("mean", (), 0),
    ):
        assert numbers.weights(name, empty(shape)).tolist() == torch.full(shape, float(value)).tolist()
    places = numbers.weights("index", torch.ones(2, 3, dtype=torch.int64))
    assert (places.dtype, int(places.sum())) == (torch.int64, 0)
    large = numbers.weights("long.weight", empty(2, random_networks.PERIOD))  # longer than what was drawn
    assert torch.isfinite(large).all()
    assert float(large[:, -1000:].float().std()) > 0


def test_large_networks_are_written_in_parts_that_the_libraries_read(tmp_path: Path, monkeypatch) -> None:
    import diffusers
    import transformers

    found = prepare("hunyuan15_lora/branch", tmp_path / "new", {"rewards": [RewardSpec(**FREE)]})
    monkeypatch.setattr(random_networks, "SHARD", 5000)
    found.write()
    for library, name in ((diffusers, "transformer"), (transformers, "text_encoder")):
        folder = tmp_path / "new" / "model" / name
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 3
        for file in files:
            weights = load_file(file).values()
            assert len(weights) == 1 or sum(one.nbytes for one in weights) <= 5000
        kind = getattr(library, found.components[name][1])
        model, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert sum(one.numel() for one in model.parameters()) == next(
            part.parameters for part in found.networks if part.folder.name == name
        )


@pytest.mark.parametrize("name", ["clip", "pickscore", "hpsv2"])
def test_random_rewards_score(name: str, tmp_path: Path) -> None:
    spec, parts = random_reward(RewardSpec(name=name, options={"num_frames": 2}), tmp_path / "new", small=True)
    for part in parts:
        part.write(RandomNumbers(torch.float32))
    assert spec.options["num_frames"] == 2
    clips = torch.randint(0, 256, (2, 3, 30, 40, 3), dtype=torch.uint8)
    ((_, scores),) = load_reward(spec)(clips, ["a red ball", "two dogs"], 8.0).items()
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize(
    ("name", "rows"),
    [("Qwen2Tokenizer", 300), ("T5TokenizerFast", 384), ("GemmaTokenizer", 400), ("CLIPTokenizer", 600)],
)
def test_tokenizers_fill_their_models_embeddings(name: str, rows: int) -> None:
    tokenizer = make_tokenizer(name, rows)
    ids = tokenizer('a red ball "HI" rolls')["input_ids"]
    assert 10 < len(ids) < 30
    assert max(tokenizer.get_vocab().values()) < rows
    assert len(tokenizer.get_vocab()) > 0.85 * rows
    assert len(set(ids)) > 8


def test_what_cannot_be_rehearsed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    spec = RewardSpec(name="hpsv3", label="mine", options={"checkpoint": "a", "base": "b", "template": "c"})
    cases = {
        "rewards mine: hpsv3 cannot be rehearsed.*Give --rewards": {"rewards": [spec]},
        "model.path black-forest/FLUX.1-dev cannot be rehearsed.*LTX-2": {"model.path": "black-forest/FLUX.1-dev"},
        "model.path None cannot": {"model.path": None},
        "leave model.adapters": {"model.adapters": [AdapterSpec(path="a")]},
        "and model.lora.path out": {"model.lora": LoraSpec(path="a")},
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message):
            prepare("wan/branch", tmp_path / "new", options)
    remote = RewardSpec(name="remote", options={"urls": ["http://a"]})
    with pytest.raises(ValueError, match="remote cannot be rehearsed"):
        random_reward(remote, tmp_path / "new", small=True)
    assert not (tmp_path / "new").exists()
    own = RewardSpec(name="some.where:reward")
    assert random_reward(own, tmp_path, small=True) == (own, [])
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="is not an empty folder"):
            prepare("wan/branch", folder)


def test_a_rehearsal_that_does_not_fit_is_refused_with_figures(tmp_path: Path, monkeypatch) -> None:
    free = {"rewards": [RewardSpec(**FREE)]}
    found = prepare("wan/branch", tmp_path / "a" / "new", free, small=False)
    card = hardware.find("h200")
    monkeypatch.setattr(hardware, "here", lambda gpus: card)
    needed = sum(found.disk())
    rooms = iter([needed - 1, needed + 1, needed + 1, math.inf])
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=next(rooms)))
    text_encoder = 2 * WAN["text_encoder"] / GIB
    monkeypatch.setattr(hardware, "cpu", lambda: replace(card, gib=text_encoder + 0.1))
    with pytest.raises(
        ConfigError, match=rf"Disk: random weights take 13.5 GiB.* about \d.\d, and {tmp_path} has .* free"
    ):
        found.check()
    found.check()
    monkeypatch.setattr(hardware, "cpu", lambda: replace(card, gib=text_encoder - 0.1))
    monkeypatch.setattr(hardware, "here", lambda gpus: hardware.find("rtx4090"))
    config = using(found.config, {"update.gradient_checkpointing": False})
    with pytest.raises(ConfigError, match=r"10.6 GiB of CPU memory, and there are 10.5.\nMemory: .*does not fit: \d+"):
        replace(found, config=config).check()
    assert not (tmp_path / "a").exists()
    judged = prepare("wan/branch", tmp_path / "new", small=False)  # VideoAlign loads its two files in float32
    needed = 2 * 2 * (WAN["text_encoder"] + 2 * sum(JUDGE.values())) / GIB
    with pytest.raises(ConfigError, match=f"takes about {needed:.1f} GiB of CPU memory"):
        replace(judged, processes=2).check()


def test_the_run_is_the_recipes_with_the_folders_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"iterations": 40, "evaluate.early": [2], "model.revision": "a", "resume": "must"}
    config = prepare("wan/branch", tmp_path / "new", asked, small=False).config
    start = recipe("wan/branch")
    assert (config.iterations, config.resume, config.data.prompts, config.data.held_out) == (
        1,
        "auto",
        "starter",
        "starter_eval",
    )
    assert (config.model.path, config.model.revision) == (str(tmp_path / "new" / "model"), None)
    assert (config.batch, config.kernel, config.model.lora) == (start.batch, start.kernel, start.model.lora)
    Path("prompts.txt").write_text("a cat")
    assert prepare("wan/branch", tmp_path / "new").config.data.prompts == "prompts.txt"
    assert (config.evaluate.prompts, config.evaluate.early, config.evaluate.steps) == (1, [], 4)
    levels = {"model.sigmas": [1.0, 0.5], "rollout.steps": 2}
    for options, steps in (({"evaluate.steps": 9}, 9), (levels, None)):
        assert prepare("wan/branch", tmp_path / "new", options).config.evaluate.steps == steps
    many = rehearse.prepare(start, tmp_path / "new", small=True, processes=3)
    assert (many.config.evaluate.prompts, many.config.batch.prompts, many.config.model.frames) == (3, 2, 5)


def test_the_table_has_each_phases_own_peak(tmp_path: Path) -> None:
    def line(**values: float) -> dict[str, float]:
        return {f"time/{name}": value for name, value in values.items()}

    memory = Memory(GIB, 0, 0, 0, 0, 0, 0)
    phases = [SimpleNamespace(name=name, seconds=5.0, memory=memory) for name in ("rollout", "update")]
    planned = SimpleNamespace(phases=phases, iteration_seconds=10.0, evaluation_seconds=3.0, peak=2 * GIB)
    lines = [
        line(encode=1, evaluate=2, total=3, peak_gib_encode=9, peak_gib_evaluate=4),
        line(rollout=6, update=7, total=13, peak_gib_rollout=5, peak_gib_update=8),
        line(rollout=6, update=6, total=12, peak_gib_rollout=5, peak_gib_update=7),
        line(evaluate=2, total=2, peak_gib_evaluate=4),
    ]
    names = ("write", "train", "resume", "export", "stock")
    measured = line(**dict.fromkeys(names, 20), **{f"peak_gib_{name}": 1 for name in names[:4]}, peak_gib_stock=30)
    rows = {row.phase: row for row in rehearse._rows(planned, lines, measured)}  # type: ignore[arg-type]
    assert list(rows) == [name for name in PHASES if name not in ("decode", "reward")]
    assert {name: row.gib for name, row in rows.items()} == {
        **{"write": 1, "train": 9, "encode": 9, "rollout": 5, "update": 8, "iteration 1": 8, "evaluate": 4},
        **{"resume": 7, "iteration 2": 7, "export": 1, "stock": 30},
    }
    assert vars(rows["update"]) == {
        "phase": "update",
        "seconds": 7,
        "planned_seconds": 5.0,
        "gib": 8,
        "planned_gib": 1.0,
    }
    assert (rows["evaluate"].planned_seconds, rows["iteration 2"].seconds, rows["iteration 1"].planned_gib) == (
        3.0,
        12,
        2.0,
    )


def test_an_export_without_an_effect_is_a_fault() -> None:
    def document(changed: float) -> dict:
        stock = {"changed": changed, "from_own": None, "from_own_untrained": None}
        return {"stock": stock, "parameters": {"vae": 2_500_000}}

    assert rehearse.fault(document(0.1)) == ""
    assert "by 1.0e-01" in rehearse.summary(document(0.1), Path("here"))
    assert "holds no training" in rehearse.summary(document(0.0), None)
    assert "not finite" in rehearse.fault(document(math.nan))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hunyuan15_lora/branch", []),  # with VideoAlign
        ("wan/sage", ["--rewards", json.dumps([FREE])]),
        ("wan/branch", ["--model.lora", "null", "--rewards", json.dumps([FREE])]),
        ("wan22/branch", ["--rewards", json.dumps([FREE])]),
        ("ltx2/branch", ["--rollout.steps", "4"]),  # with VideoAlign and CLAP
    ],
)
def test_a_small_rehearsal_runs_everything(name: str, options: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", name, "--small", "true", "--folder", "new", "--log.progress", "false", *options]) == 0
    printed, found = capsys.readouterr().out, json.loads(Path("new/rehearsal.json").read_text())
    phases = [row["phase"] for row in found["phases"]]
    assert phases == PHASES
    assert all(f" {phase} " in printed for phase in phases)
    assert all(row["seconds"] > 0 for row in found["phases"])
    assert "Resumed from new/run/checkpoints/000001 at iteration 1." in printed
    rows = [json.loads(line) for line in Path("new/run/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "time/update" in row] == [1, 2]
    stock = found["stock"]
    assert stock["changed"] > 1e-4
    if name != "ltx2/branch":
        assert stock["from_own"] < 1e-5 < stock["from_own_untrained"]
    whole = Path("new/export/model_index.json").is_file()
    assert whole == ("null" in options)


@pytest.mark.slow
def test_two_processes_rehearse_together_and_leave_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "sage_grpo", "rehearse"]
    options = ["--small", "true", "--rewards", json.dumps([FREE]), "--rollout.steps", "4"]
    ended = subprocess.run(
        [*command, "wan/branch", *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (
        ended.stdout.count("rehearsal on 2 x ")
        == ended.stdout.count("the export changes the transformer's output by")
        == 1
    )
    assert "Everything is in" not in ended.stdout
    assert not list(tmp_path.iterdir())
