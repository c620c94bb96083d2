"""The wheel builds, carries what it should, and works when it alone is on the path."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = folder.glob("dropmatch-*.whl")
    return built


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src").rglob("*.py")}
    assert modules <= names
    assert "dropmatch/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(name.startswith(("dropmatch/", "dropmatch-")) for name in names)


def test_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = (
        "import torch, dropmatch, sys\n"
        f"assert dropmatch.__file__.startswith({str(site)!r}), dropmatch.__file__\n"
        "from dropmatch.acceptance import rule_names\n"
        "from dropmatch.masks import dropout_masks\n"
        "print(rule_names(), dropout_masks(torch.zeros(1).long(), torch.zeros(1).long(), 2, 8, 0.0).all().item())\n"
        "from dropmatch.cli import main\n"
        "sys.argv = ['dropmatch', 'rules']\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert "'js', 'margin', 'naive', 'strict'" in result.stdout, result.stderr
    assert "lossless" in result.stdout
