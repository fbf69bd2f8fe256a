"""Kernels and sinks of one's own, by their import paths: they are used as those of the package are, and refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import trainer_toys
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.folder import identity
from sage_grpo.folder.journal import read_rows
from sage_grpo.folder.saved import read_config
from sage_grpo.models import ModelError
from sage_grpo.session import run
from sage_grpo.session.preflight import preflight
from sage_grpo.training.config import LogConfig, TrainConfig
from sage_grpo.training.inputs import Given

OWN = "trainer_toys:Quiet"


def test_a_kernel_of_ones_own_trains_and_replays_to_the_bit(make_config, make_trainer) -> None:
    config = make_config(kernel=KernelSpec(name=OWN, eta=0.5))
    trainer = make_trainer(config)
    assert type(trainer.planner.kernel) is trainer_toys.Quiet
    assert trainer.step()["ratio/first_log"] == 0.0
    assert trainer.log[1]["ratio/largest_log"] > 0


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"kernel": KernelSpec(name="subprocess:Popen")}, "is not a kernel: it must be a dataclass with"),
        ({"log": LogConfig(sinks=["trainer_toys:Kep"])}, "trainer_toys has no 'Kep'. Did you mean 'Kept'"),
        ({"log": LogConfig(sinks=["trainer_toys:bright"])}, "log.sinks 'trainer_toys:bright' is not a sink"),
    ],
)
def test_what_is_not_a_kernel_or_a_sink_is_refused_before_a_run(named, said: str, make_config) -> None:
    with pytest.raises(ValueError, match=said):
        preflight(make_config(**named))


def test_the_code_of_a_decoder_is_part_of_what_a_run_is_and_is_not_taken_from_a_strangers_folder(
    make_config, tmp_path: Path
) -> None:
    config = replace(make_config(), rewards=TrainConfig().rewards)
    (tmp_path / "tiny").mkdir()
    weights = tmp_path / "tiny" / "weights.safetensors"
    prints, tiny = [identity._of_plugins(config, Given())], str(tmp_path / "tiny")
    for name, content in (("trainer_toys:darker", b""), (tiny, b"one"), (tiny, b"two")):
        weights.write_bytes(content)
        own = replace(config, model=replace(config.model, decoder=name))
        prints.append(identity._of_plugins(own, Given()))
    assert len(set(prints)) == 4
    misspelt = replace(config, model=replace(config.model, decoder="trainer_toys:darkr"))
    with pytest.raises(ModelError, match=r"model\.decoder 'trainer_toys:darkr': .*Did you mean 'darker'\?"):
        preflight(misspelt)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"decoder": "trainer_toys:darker"}}))
    with pytest.raises(ValueError, match=r"names the code trainer_toys:darker \(model\.decoder\).*--trust_run"):
        read_config(tmp_path)
    assert read_config(tmp_path, trust=True).model.decoder == "trainer_toys:darker"


def test_a_sink_of_ones_own_gets_every_row(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_toys.Kept, "rows", [])
    monkeypatch.setattr(trainer_toys.Kept, "closed", [])
    config = make_config(iterations=1, log=LogConfig(tensorboard=False, progress=False, sinks=["trainer_toys:Kept"]))
    run(config)
    written = [row["iteration"] for row in read_rows(Path(config.out) / "metrics.jsonl")]
    assert [iteration for iteration, _ in trainer_toys.Kept.rows] == written
    assert trainer_toys.Kept.closed == [Path(config.out)]
