"""The script that runs the tests in every setting, and the plugin that shuffles them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from matrix_plugin import shuffled

ROOT = Path(__file__).parents[1]
TOLD = """<testsuites><testsuite>
<testcase classname="tests.flow.test_path" name="test_a"/>
<testcase classname="tests.flow.test_path" name="test_b[1]"><failure message="off"/></testcase>
<testcase classname="tests.flow.test_path" name="test_c"><error message="setup"/></testcase>
<testcase classname="tests.flow.test_path" name="test_d"><skipped message="needs a GPU"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_matrix_script", ROOT / "scripts" / "test_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        loaded = importlib.util.module_from_spec(spec)
        patch.setitem(importlib.import_module("sys").modules, spec.name, loaded)  # dataclasses look there
        spec.loader.exec_module(loaded)
    return loaded


def test_shuffled_tests_are_all_there_and_files_stay_together() -> None:
    items = [SimpleNamespace(path=Path(f"{file}.py"), number=n) for file in "abcdef" for n in range(8)]
    one, again, other = (shuffled(items, seed) for seed in (1, 1, 2))
    assert one == again != other != items
    assert sorted(map(id, one)) == sorted(map(id, items))
    files = [item.path for item in one]
    assert [file for place, file in enumerate(files) if file != files[place - 1]] == list(dict.fromkeys(files))
    assert list(dict.fromkeys(files)) != sorted(set(files))
    assert [item.number for item in one if item.path == files[0]] != list(range(8))


def test_a_worker_that_collects_in_another_order_shuffles_to_the_same_files() -> None:
    items = [SimpleNamespace(path=Path(f"{file}.py")) for file in "abcdef"]
    assert [item.path for item in shuffled(items, 3)] == [item.path for item in shuffled(items[::-1], 3)]


def test_the_table_counts_what_pytest_says_and_a_failure_fails_the_script(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SAGE_GRPO_MKLDNN", "SAGE_GRPO_SHUFFLE"):  # the script may be what runs this test
        monkeypatch.delenv(name, raising=False)
    environments: list[dict[str, str]] = []

    def pytest_ran(command: list[str], *, env: dict[str, str], **rest: object) -> SimpleNamespace:
        environments.append(env)
        (file,) = (word.partition("=")[2] for word in command if word.startswith("--junitxml="))
        assert command[-2:] == ["-k", "flow"]
        broken = env.get("SAGE_GRPO_MKLDNN") == "off"
        Path(file).write_text(TOLD if broken else re.sub("<(failure|error) [^>]*>", "", TOLD))
        return SimpleNamespace(returncode=int(broken))

    monkeypatch.setattr(subprocess, "run", pytest_ran)
    assert matrix.main(["--only", "two-threads", "--", "-k", "flow"]) == 0
    assert environments[-1]["OMP_NUM_THREADS"] == "2"
    assert "| two threads | 3 | 0 | 1 |" in capsys.readouterr().out
    assert matrix.main(["--", "-k", "flow"]) == 1
    assert len(environments) == 1 + len(matrix.SETTINGS)
    said = capsys.readouterr().out
    assert "| without oneDNN | 1 | 2 | 1 |" in said
    assert "without oneDNN: tests/flow/test_path.py::test_b[1]" in said
    with pytest.raises(SystemExit):
        matrix.main(["--only", "three-threads"])


def test_a_run_without_a_result_is_no_success(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *given, **rest: SimpleNamespace(returncode=4))
    assert matrix.main(["--only", "portable"]) == 1


def test_the_workflow_runs_every_setting_on_both_architectures(matrix: ModuleType) -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    found = jobs["matrix"]["strategy"]["matrix"]
    assert [name.replace("-", " ") for name in found["setting"]] == list(matrix.SETTINGS)
    assert {name.endswith("-arm") for name in found["os"]} == {True, False}
