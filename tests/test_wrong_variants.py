"""The suite must reject known-wrong variants of the engine: a sample here, all of them with `-m slow`."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from wrong_variants import CONTROL, MODEL_VARIANTS, VARIANTS

ROOT = pathlib.Path(__file__).resolve().parent.parent
SAMPLE, ALL = VARIANTS[3::26] + MODEL_VARIANTS[20::100], VARIANTS + MODEL_VARIANTS


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variant")
    for name in ("nanoengine", "tests", "pyproject.toml", *(path.name for path in ROOT.glob("*.py"))):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    return folder


def suite_passes(tree, variant, test_file):
    """Whether `test_file` passes in a copy of the repo with the variant's line."""
    file, old, new = variant[:3]
    path = tree / "nanoengine" / file
    text = path.read_text()
    path.write_text(text.replace(old, new))
    try:
        run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{test_file}"],
                             cwd=tree, capture_output=True, text=True, timeout=300,
                             env=os.environ | {"NANOENGINE_NO_SHRINK": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    finally:
        path.write_text(text)
    assert run.returncode in (0, 1), run.stdout + run.stderr        # anything else is no verdict
    return run.returncode == 0


def test_every_old_snippet_stands_exactly_once():
    for file, old, new, wrong, _ in [*ALL, CONTROL]:
        assert (ROOT / "nanoengine" / file).read_text().count(old) == 1 and old != new, (file, old, wrong)


def test_every_named_test_is_found_in_the_copy(tree):
    """Else a variant would be no longer judged, and only the slow tests would show it."""
    names = sorted({f"tests/{name}" for variant in ALL for name in variant[4]})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *names]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("test_file", ["test_block_manager.py", "test_scheduler.py", "test_step_input.py"])
def test_the_suite_passes_without_a_mistake(tree, test_file):
    assert suite_passes(tree, CONTROL, test_file)


@pytest.mark.parametrize("variant", [
    pytest.param(v, marks=() if v in SAMPLE else pytest.mark.slow, id=f"{n} {v[3]}") for n, v in enumerate(ALL)])
def test_a_variant_is_rejected(tree, variant):
    for test_file in variant[4]:
        assert not suite_passes(tree, variant, test_file), f"{test_file} accepts: {variant[3]}"
