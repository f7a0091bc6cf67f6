"""Open projects are proved: tests in exercises/projects/ fail on the engine, and pass with the reference solution.
All in copies of the repo. The first project here, the others with `-m slow`."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECTS = sorted(path.stem for path in (ROOT / "exercises" / "projects").glob("*.patch"))
SOME = [pytest.param(name, marks=pytest.mark.slow if n else ()) for n, name in enumerate(PROJECTS)]


@pytest.fixture
def tree(tmp_path):
    for name in ("nanoengine", "tests", "exercises"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(tree, *command):
    environment = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    return subprocess.run(command, cwd=tree, env=os.environ | environment, capture_output=True, text=True, timeout=600)


def apply(tree, name):
    done = run(tree, "git", "apply", f"exercises/projects/{name}.patch")
    assert done.returncode == 0, done.stderr


def passes(tree, name):
    where = run(tree, sys.executable, "-c", "import nanoengine; print(nanoengine.__file__)").stdout.strip()
    assert pathlib.Path(where).resolve() == (tree / "nanoengine" / "__init__.py").resolve()
    options = "-q", "-x", "-p", "no:cacheprovider", f"exercises/projects/test_{name}.py"
    done = run(tree, sys.executable, "-m", "pytest", *options)
    print(done.stdout[-3000:], done.stderr)
    assert done.returncode in (0, 1, 2), "no verdict"  # 2: what it imports isn't there
    return done.returncode == 0


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_is_complete_and_its_patch_applies_to_the_package_alone(tree, name):
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    apply(tree, name)
    changed = [path for path in tree.rglob("*") if path.is_file() and path.read_bytes() != before.get(path)]
    assert {path.parent for path in changed} == {tree / "nanoengine"}
    assert max(len(line) for path in changed for line in path.read_text().splitlines()) <= 120
    assert all((ROOT / "exercises" / "projects" / file).exists() for file in (f"{name}.md", f"test_{name}.py"))


@pytest.mark.parametrize("name", SOME)
def test_its_tests_fail_without_the_solution_and_pass_with_it(tree, name):
    assert not passes(tree, name)
    apply(tree, name)
    assert passes(tree, name)
