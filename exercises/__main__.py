"""python -m exercises list                        the exercises, in a good order
python -m exercises start NAME [--force]        make work/NAME: the engine without the bodies to be written
python -m exercises check NAME [pytest args]    run the exercise's tests on work/NAME, the easiest first
python -m exercises diff NAME                   the engine's version of the functions beside yours
python -m exercises export DIR                  a tree for a class: all exercises' bodies are missing"""
import ast
import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from exercises.catalogue import EXERCISES, Exercise

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = "__pycache__", "*.patch", "*wrong_variants.py", "test_exercises.py", "test_projects.py"    # quote bodies
TO_WRITE = "TO_WRITE.md"            # in trees whose engine lacks bodies

def functions(source: str) -> dict[str, ast.FunctionDef]:
    """Functions and methods by name: "f", "Class.f"."""
    found = {}
    for node in ast.parse(source).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                found[inner.name if inner is node else f"{node.name}.{inner.name}"] = inner
    return found

def cut(source: str, names: list[str]) -> str:
    """The source without the bodies of these functions. Signatures, docstrings and all else stay, byte for byte."""
    lines, nodes = source.split("\n"), functions(source)
    for node in sorted((nodes[name] for name in names), key=lambda node: -node.lineno):
        first = node.body[0]
        start = first.lineno - 1 if ast.get_docstring(node) is None else first.end_lineno
        while lines[start - 1].lstrip().startswith("#"):        # a comment above the first statement goes with it
            start -= 1
        lines[start:node.end_lineno] = [" " * first.col_offset + "raise NotImplementedError"]
    return "\n".join(lines)

def copy_folders(folder: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)

def make_tree(folder: Path, exercises: list[Exercise]) -> None:
    """The engine with all that it takes to run and test it, without the bodies that these exercises ask for."""
    copy_folders(folder, "nanoengine", "tests", "exercises")
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".html", ".toml") or path.name in ("LICENSE", "README.md", ".gitignore"):
            shutil.copy(path, folder)
    for file in {file for exercise in exercises for file in exercise.functions}:
        names = [name for exercise in exercises for name in exercise.functions.get(file, ())]
        (path := folder / "nanoengine" / file).write_text(cut(path.read_text(), names))
    rows = [f"1. [{e.title}](exercises/{e.name}.md): `python -m exercises check {e.name} -x`\n" for e in exercises]
    (folder / TO_WRITE).write_text(f"""# nanoengine with bodies missing\n
Write what raises NotImplementedError in `nanoengine/`. If several exercises are listed: `blocks`, `prefix-cache` need
each other, the scheduler's walk the first four, `decoder`'s logits `tensor-parallel`; greedy engines need all but
rules, filters, graphs, Channel, serve (ranks do). If `-x` stops at another's body: done for now.\n\n{"".join(rows)}""")

def start(exercise: Exercise, is_forced: bool) -> None:
    folder = ROOT / "work" / exercise.name
    if folder.exists() and not is_forced:
        sys.exit(f"{folder} exists already; --force throws away what you wrote there")
    shutil.rmtree(folder, ignore_errors=True)
    make_tree(folder, [exercise])
    place = folder.relative_to(ROOT)
    print(f"{exercise.title}. Needs {exercise.needs}. Read exercises/{exercise.name}.md, then write:")
    for file, names in exercise.functions.items():
        print(f"    {place}/nanoengine/{file}: {', '.join(names)}")
    print(f"Test it with: python -m exercises check {exercise.name} -x\nRun it with:  python {place}/example.py")

def working_folder(exercise: Exercise) -> Path:
    folder = ROOT if (ROOT / TO_WRITE).exists() else ROOT / "work" / exercise.name
    return folder if folder.exists() else sys.exit(f"{folder} isn't there: python -m exercises start {exercise.name}")

def pytest_args(exercise: Exercise) -> list[str]:
    return ["--doctest-glob=*.md", f"exercises/{exercise.name}.md", *(f"tests/{test}" for test in exercise.tests)]

def check(exercise: Exercise, options: list[str] = ()) -> int:
    """Run the handout's examples, then this repo's tests, in their newest state, on the copy. Whatever a test starts
    imports the copy too: it inherits PYTHONPATH, and tests set working folders relative to their own place."""
    folder = working_folder(exercise)
    if folder != ROOT:
        copy_folders(folder, "tests", "exercises")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    place = {"cwd": folder, "env": os.environ | {"PYTHONPATH": path}}
    program = [sys.executable, "-c", "import nanoengine; print(nanoengine.__file__)"]
    found = subprocess.run(program, capture_output=True, text=True, **place).stdout.strip()
    if Path(found).parent != folder / "nanoengine":
        sys.exit(f"Python imports {found or 'nothing'} instead of {folder / 'nanoengine'}")
    return subprocess.call([sys.executable, "-m", "pytest", *pytest_args(exercise), *options], **place)

def diff(exercise: Exercise) -> None:
    folder = working_folder(exercise)
    if check(exercise, ["-q", "-x"]) and input("The check doesn't pass yet. See the engine's version? [y/N] ") != "y":
        return
    for file, names in exercise.functions.items():
        for name in names:
            sides = [body((tree / "nanoengine" / file).read_text(), name) for tree in (ROOT, folder)]
            print(*difflib.unified_diff(*sides, f"engine's {name}", f"your {name}", lineterm="", n=99), "", sep="\n")

def body(source: str, name: str) -> list[str]:
    node = functions(source).get(name)
    return source.split("\n")[node.lineno - 1:node.end_lineno] if node else []

def export(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} isn't empty")
    make_tree(folder, EXERCISES)

def main(arguments: list[str]) -> int | None:
    by_name = {exercise.name: exercise for exercise in EXERCISES}
    match arguments:
        case ["start" | "diff" | "export", *_] if (ROOT / TO_WRITE).exists():
            sys.exit(f"the engine in this tree is the one to write (see {TO_WRITE}): nothing to copy or compare with")
        case ["list"]:
            print(*(f"{e.name:16}{e.title} ({e.needs})" for e in EXERCISES), sep="\n")
        case ["start", name, *force] if name in by_name and force in ([], ["--force"]):
            start(by_name[name], bool(force))
        case ["check", name, *options] if name in by_name:
            return check(by_name[name], options)
        case ["diff", name] if name in by_name:
            diff(by_name[name])
        case ["export", folder]:
            export(Path(folder))
        case _:
            print(f"{__doc__}\n\nNAME is one of: {', '.join(by_name)}")
            return 2

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
