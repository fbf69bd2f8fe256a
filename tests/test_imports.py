"""Starting is cheap: the package, its help and the configs come without the heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HEAVY = ("diffusers", "transformers", "peft", "accelerate", "matplotlib", "tensorboard", "wandb", "av", "scipy", "ray")
SOURCE = Path(__file__).resolve().parent.parent / "src" / "sage_grpo"


def _modules_after(code: str) -> set[str]:
    script = (
        f"import json, sys\n{code}\nprint('\\n' + json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import sage_grpo",
        "from sage_grpo import train, evaluate, generate\nassert callable(train)",
        "from sage_grpo.cli.main import main\nassert main(['--help']) == 0",
    ],
    ids=["import", "api", "help"],
)
def test_the_package_and_its_help_need_no_library_at_all(code: str) -> None:
    loaded = _modules_after(code)
    assert "sage_grpo" in loaded
    assert not loaded & {*HEAVY, "torch", "numpy", "jsonargparse", "rich"}


def test_the_core_and_configs_need_torch_and_nothing_else_that_is_heavy() -> None:
    """A spec is a frozen dataclass whose load() imports the heavy thing."""
    folders = [SOURCE / "samplers", SOURCE / "objectives"]
    names = [f"{folder.name}.{path.stem}" for folder in folders for path in sorted(folder.glob("[a-z]*.py"))]
    names += ["types", "tools.inspect", "training.config", "models.spec", "rewards.spec"]
    loaded = _modules_after("\n".join(f"import sage_grpo.{name}" for name in names))
    assert "torch" in loaded
    assert not loaded & set(HEAVY)
