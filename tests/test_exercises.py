"""The exercises' graders are proved: each passes on the engine, fails without the bodies, and rejects wrong answers.

One process (this file, run as a script) imports torch and transformers once, and forks for every variant of the engine.
A sample runs here, all of it with `-m slow`.
"""

import ast
import contextlib
import gc
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def serve():
    """For each line {"args": [...], "seconds": n} on stdin: fork, run pytest in the working folder, answer with its
    exit code (None if it took longer). What it prints is in log.txt."""
    sys.path[0:1] = [os.getcwd(), str(pathlib.Path("tests").resolve())]
    import hypothesis  # noqa: F401
    import pytest
    import torch
    import transformers

    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    torch.set_num_threads(1)
    for name in ("AutoModelForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        getattr(transformers, name)
    gc.collect(), gc.freeze()  # or each child, when it collects, copies all pages of torch and transformers
    for line in sys.stdin:
        job = json.loads(line)
        if (pid := os.fork()) == 0:
            os.setsid()
            with open("log.txt", "wb", buffering=0) as log:
                os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            code = 3
            try:
                code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *job["args"]]))
            finally:
                os._exit(code)
        end = time.monotonic() + job["seconds"]
        while time.monotonic() < end and not (done := os.waitpid(pid, os.WNOHANG))[0]:
            time.sleep(0.02)
        if not done[0]:
            os.killpg(pid, signal.SIGKILL)  # ranks that it started, too; otherwise these end by themselves
            os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(done[1]) if done[0] else None), flush=True)


if __name__ == "__main__":
    del __file__  # spawned ranks would import it
    serve()
    sys.exit()

import pytest  # noqa: E402
from wrong_variants import VARIANTS  # noqa: E402

from exercises import __main__ as cli  # noqa: E402
from exercises.__main__ import cut, functions, main, make_tree, pytest_args  # noqa: E402
from exercises.catalogue import EXERCISES  # noqa: E402

BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


def listed(*texts):
    """Entries of wrong_variants.py, by what is wrong in them."""
    return [next(variant[:4] for variant in VARIANTS if variant[3] == text) for text in texts]


# exercise -> [(file, old snippet, new snippet, what is wrong)]; the old one stands once in the file, in a body to write
WRONG = {
    "blocks": listed(
        "a full last block gets an empty one behind it",
        "a free hit is counted as a new block too",
        "the block freed last is reused first",
        "a shared block is free while another sequence uses it",
        "a reused twin takes the first one's entry",
    ),
    "prefix-cache": listed(
        "a prompt found whole has no token left to compute",
        "a hash collision gives another prompt's block",
        "a twin's children can't be found",
        "a block that two chunks filled isn't findable",
        "a block is findable before it is full",
    ),
    "scheduler": listed(
        "running sequences don't share the budget",
        "a preempted sequence is readmitted while its token is in flight",
        "the oldest is preempted",
        "an unfinished prompt draws a token",
        "the last token is not seen as such",
    ),
    "step-input": listed(
        "a chunk that ends with a block sends one block too many",
        "the ranks don't learn a cached prefix's blocks",
        "tokens go to the next chunk's blocks",
        "chunks behind the decodes read the decodes' queries",
        "a chunk behind a prefix doesn't see the prefix's keys",
    ),
    "sampler": [
        ("kernels.py", "(bits.float() + 0.5)", "bits.float()", "the smallest noise is infinite"),
        ("sampler.py", "probs.cumsum(dim=-1) - probs < top_p", "probs.cumsum(dim=-1) < top_p",
         "the token that reaches top_p is left out"),
        ("sampler.py", "torch.where(logits > 0, logits / repetition, logits * repetition)", "logits / repetition",
         "a repetition penalty raises negative logits"),
        ("sampler.py", "(drawn > 0)", "(given + drawn > 0)", "the prompt's tokens are punished for their presence"),
        ("sampler.py", "(positions[row] < end)", "(positions[row] <= end)", "a rule holds one token too long"),
    ],
    "paged-attention": [
        ("attention.py", "position <= seen[:, :, None]", "position <= last[:, :, None]",
         "a chunk's tokens see those behind them"),
        ("attention.py", "key = position.minimum(last)", "key = position", "what was never written is read"),
        ("attention.py", "block_tables[c.rows[first:end, None], key", "block_tables[c.rows[:end - first, None], key",
         "the first rows' tables serve all groups"),
        ("attention.py", "* block_size + key % block_size", "* block_size", "every key is its block's first"),
        ("attention.py", "unflatten(2, (num_kv_heads, -1))", "unflatten(2, (-1, num_kv_heads)).transpose(2, 3)",
         "query heads are dealt to the KV heads in turn"),
    ],
    "decoder": [
        ("kernels.py", "qk.float().chunk(2, dim=-1)", "qk.float().unflatten(-1, (-1, 2)).unbind(-1)",
         "neighbours are paired instead of halves"),
        ("kernels.py", "tables[rows, positions // block_size]", "tables[rows[:1], positions[:1] // block_size]",
         "later blocks don't reach the table"),
        ("decoder.py", "** (2 * i / head_dim)", "** (i / head_dim)", "frequencies fall half as fast"),
        ("decoder.py", "q.shape[2] ** -0.5", "q.shape[2] ** -1", "scores are divided by the head's size"),
        ("decoder.py", "torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor",
         "torch.stack((angles.cos(), angles.sin()), dim=1)", "yarn's attention factor is lost"),
    ],
    "tensor-parallel": [
        ("linear.py", "or self.inputs.rank > 0", "", "every rank adds the bias"),
        ("linear.py", "tensor.split(sizes)", "(tensor[:size] for size in sizes)",
         "all parts of a fused weight go to its beginning"),
        ("linear.py", "max(self.outputs.rank, self.inputs.rank)", "self.outputs.rank",
         "every rank of a row-parallel layer reads the first columns"),
        ("linear.py", "self.weight), is_here[:, None]", "self.weight), torch.ones_like(is_here)[:, None]",
         "every rank adds its first word for the words of others"),
        ("decoder.py", "self.group.all_reduce(x) if self.group.bases is None else x", "x",
         "each rank goes on with its part of the sum"),
    ],
    "asynchrony": [
        ("llm_engine.py", "            if self.config.async_scheduling:\n", "            if True:\n",
         "nobody can have a step's result at once"),
        ("llm_engine.py", "launched, self._in_flight = self._in_flight, launched", "self._in_flight = launched",
         "a result is taken in at once all the same"),
        ("llm_engine.py", 'if sequence.finish_reason != "stop":', "if True:", "a stop token's text is shown"),
        ("llm_engine.py", 'self._end(chunk.sequence, "error")', "pass", "a failed step's requests never end"),
        ("llm_engine.py", "if sequence.text.is_stopped or sequence.finish_reason:", "if sequence.finish_reason:",
         "a stop string doesn't stop"),
    ],
    "rpc": [
        ("rpc.py", "self.number, len(data)", "self.number, len(part)",
         "a long message's first part is taken for all of it"),
        ("rpc.py", "                while not self.copied.acquire(timeout=0.2):\n                    check()\n",
         "                self.copied.acquire(timeout=0.2)\n", "what a slow reader still reads is overwritten"),
        ("rpc.py", "            if number != self.number:", "            if False:", "a lost part isn't noticed"),
        ("rpc.py", "self._guard(getattr(self.runner, method), *args)", "getattr(self.runner, method)(*args)",
         "rank 0 tells of a broken connection, not of who broke it"),
        ("rpc.py", "        error.value = traceback.format_exc()[-len(error):]\n", "        pass\n",
         "a peer's traceback is lost"),
    ],
    "cuda-graphs": [
        ("cuda_graph.py", "for size in reversed(batch_sizes):", "for size in batch_sizes:", "the smallest comes first"),
        ("cuda_graph.py", "in batch_sizes if size >= n)", "in batch_sizes if size > n)",
         "a batch that fits exactly goes to the next bucket"),
        ("cuda_graph.py", "            decode(inputs)  ", "            pass  ", "kernels compile during the capture"),
        ("cuda_graph.py", "static_inputs.copy_(inputs, non_blocking=True)", "static_inputs = inputs",
         "the graph never sees its inputs"),
        ("cuda_graph.py", "torch.cuda.CUDAGraph(), pool=pool", "torch.cuda.CUDAGraph(), pool=None",
         "each graph has memory of its own"),
    ],
}


def changed(text, file, old, new, wrong):
    assert text.count(old) == 1 and old != new, (file, old, wrong)
    return text.replace(old, new)


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """passes(args of pytest, {file: text}) -> whether its tests pass with these files of nanoengine/ changed."""
    tree = tmp_path_factory.mktemp("tree")
    make_tree(tree, [])
    environment = os.environ | {"NANOENGINE_NO_SHRINK": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    server = subprocess.Popen([sys.executable, __file__], cwd=tree, env=environment, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def passes(args, files):
        for file, text in files.items():
            (tree / "nanoengine" / file).write_text(text)
        shutil.rmtree(tree / "nanoengine" / "__pycache__", ignore_errors=True)  # two variants may look equally old
        print(json.dumps({"args": args, "seconds": 300}), file=server.stdin, flush=True)
        code = json.loads(server.stdout.readline())
        for file in files:
            shutil.copy(ROOT / "nanoengine" / file, tree / "nanoengine")
        print((tree / "log.txt").read_text()[-5000:])
        assert code in (0, 1), f"no verdict: {code}"
        return code == 0

    with server:
        yield passes
        server.stdin.close()


def engine_text(file):
    return (ROOT / "nanoengine" / file).read_text()


def without_bodies(exercise):
    return {file: cut(engine_text(file), names) for file, names in exercise.functions.items()}


def all_but(slow, *values):
    return [pytest.param(*value, id=value[0].name + ": " * (len(value) > 1) + "".join(v[3] for v in value[1:]),
                         marks=pytest.mark.slow if slow(n, value[0].name) else ())
            for n, value in enumerate(values)]  # fmt: skip


@pytest.mark.parametrize("exercise", all_but(lambda n, name: name != "cuda-graphs", *((e,) for e in EXERCISES)))
def test_the_engine_passes(passes, exercise):
    assert passes(pytest_args(exercise), {})


@pytest.mark.parametrize("exercise", all_but(lambda n, name: n % 4, *((e,) for e in EXERCISES)))
def test_without_the_bodies_it_fails(passes, exercise):
    assert not passes(pytest_args(exercise)[2:], without_bodies(exercise))  # by its tests, not the handout's examples


ANSWERS = [(BY_NAME[name], wrong) for name, answers in WRONG.items() for wrong in answers]


@pytest.mark.parametrize("exercise, wrong", all_but(lambda n, name: n % 11 != 4 or name == "rpc", *ANSWERS))
def test_a_wrong_answer_is_rejected(passes, exercise, wrong):
    files = {wrong[0]: changed(engine_text(wrong[0]), *wrong)}
    assert not passes(pytest_args(exercise)[2:], files), wrong[3]


# ---- the commands, in a copy of the repo


@pytest.fixture
def repo(tmp_path, monkeypatch):
    folder = tmp_path / "repo"
    folder.mkdir()
    make_tree(folder, [])
    (folder / "TO_WRITE.md").unlink()
    monkeypatch.setattr(cli, "ROOT", folder)
    return folder


def test_the_list_and_what_is_unknown(capsys):
    assert main(["list"]) is None
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BY_NAME)
    for arguments in ([], ["start", "nothing"], ["start", "blocks", "--hurry"], ["check"], ["diff"], ["export"]):
        assert main(arguments) == 2 and "blocks" in capsys.readouterr().out


@pytest.mark.parametrize("name", BY_NAME)
def test_start_makes_an_engine_without_the_bodies(repo, name, capsys):
    assert main(["start", name]) is None
    folder, parts = repo / "work" / name, without_bodies(BY_NAME[name])
    for path in sorted((ROOT / "nanoengine").glob("*.py")):
        assert (folder / "nanoengine" / path.name).read_text() == parts.get(path.name, path.read_text())
    assert (folder / "example.py").exists() and not (folder / "tests" / "wrong_variants.py").exists()
    told = capsys.readouterr().out + (folder / "TO_WRITE.md").read_text()
    assert all(part in told for part in [f"work/{name}/nanoengine", f"exercises/{name}.md", f"check {name}", *parts])


def test_start_overwrites_nothing_unless_it_is_forced(repo):
    main(["start", "blocks"])
    file = repo / "work" / "blocks" / "nanoengine" / "block_manager.py"
    file.write_text("mine")
    with pytest.raises(SystemExit, match="--force"):
        main(["start", "blocks"])
    assert file.read_text() == "mine"
    main(["start", "blocks", "--force"])
    assert file.read_text() != "mine"


def test_check_runs_the_repos_tests_on_the_copy_and_passes_options_on(repo, capfd):
    with pytest.raises(SystemExit, match="start step-input"):
        main(["check", "step-input"])
    main(["start", "step-input"])
    copy = repo / "work" / "step-input"
    shutil.copy(ROOT / "nanoengine" / "step_input.py", copy / "nanoengine")
    (copy / "tests" / "test_step_input.py").write_text("")
    assert main(["check", "step-input", "-k", "one_prompt or two_decodes"]) == 0
    assert "2 passed" in capfd.readouterr().out


WHERE = """
import pathlib
import nanoengine
from test_rpc import in_peers, start

def write_where(path):
    pathlib.Path(path).write_text(nanoengine.__file__)

def test_where(checkpoint):
    with start(checkpoint("llama")) as llm:
        write_where("rank0")
        in_peers(llm, write_where, "rank1")
        llm.generate([[1, 2]], use_tqdm=False)
"""


@pytest.mark.slow
def test_spawned_ranks_import_the_copy_too(repo, monkeypatch):
    """Whatever else is on the path, and wherever `check` is called."""
    main(["start", "rpc"])
    copy = repo / "work" / "rpc"
    shutil.copy(ROOT / "nanoengine" / "rpc.py", copy / "nanoengine")
    (repo / "tests" / "test_where.py").write_text(WHERE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)
    assert main(["check", "rpc", "-q", "tests/test_where.py", "-k", "where"]) == 0
    assert [(copy / name).read_text() for name in ("rank0", "rank1")] == [str(copy / "nanoengine" / "__init__.py")] * 2


def test_diff_asks_first_if_the_check_fails(repo, monkeypatch, capsys):
    main(["start", "prefix-cache"])
    capsys.readouterr()
    codes, answers = [1, 1, 0], ["", "y"]
    monkeypatch.setattr(cli, "check", lambda *_: codes.pop(0))
    monkeypatch.setattr("builtins.input", lambda _: answers.pop(0))
    assert main(["diff", "prefix-cache"]) is None and capsys.readouterr().out == ""
    for _ in range(2):  # asked for, and with a check that passes
        main(["diff", "prefix-cache"])
        shown = capsys.readouterr().out
        assert "\n-        return hits\n" in shown and "\n+        raise NotImplementedError\n" in shown
    assert codes == answers == []


def test_a_classroom_s_tree_holds_no_body(repo, capsys):
    folder = repo.parent / "class"
    assert main(["export", str(folder)]) is None
    for exercise in EXERCISES:
        for file, names in exercise.functions.items():
            text = (folder / "nanoengine" / file).read_text()
            assert all(ast.unparse(functions(text)[name].body[-1]) == "raise NotImplementedError" for name in names)
            assert (folder / "exercises" / f"{exercise.name}.md").exists()
    assert not {"test_exercises.py", "wrong_variants.py"} & {path.name for path in folder.rglob("*.py")}
    assert not list(folder.rglob("*.patch"))  # solutions of the open projects
    with pytest.raises(SystemExit, match="isn't empty"):
        main(["export", str(folder)])


def test_in_a_classroom_the_tree_itself_is_checked(repo):
    folder = repo.parent / "class"
    main(["export", str(folder)])

    def run(*arguments):
        command = [sys.executable, "-m", "exercises", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)

    assert "TO_WRITE.md" in run("start", "blocks").stderr
    failed = run("check", "step-input", "-x", "-k", "one_prompt or two_decodes").stdout
    assert "NotImplementedError" in failed and "1 failed" in failed


# ---- without running anything


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_cut_leaves_everything_but_the_bodies(exercise):
    for file, names in exercise.functions.items():
        text = engine_text(file)
        for name in names:
            node, lines = functions(text)[name], text.split("\n")
            short = cut(text, [name])
            after = functions(short)[name]
            assert ast.unparse(after.body[-1]) == "raise NotImplementedError"
            assert ast.get_docstring(after) == ast.get_docstring(node) and after.lineno == node.lineno
            assert len(after.body) == 1 + (ast.get_docstring(node) is not None)
            assert short.split("\n")[: after.end_lineno - 1] == lines[: after.end_lineno - 1]
            assert short.split("\n")[after.end_lineno :] == lines[node.end_lineno :]
            node.body = after.body
        compile(cut(text, names), file, "exec")


def test_comments_above_the_first_statement_and_inner_functions_are_cut_too():
    text = "def f(x):  # kept\n    # a hint\n    def g():\n        return 1\n    return g  # gone\n# kept\ny = 1\n"
    assert cut(text, ["f"]) == "def f(x):  # kept\n    raise NotImplementedError\n# kept\ny = 1\n"
    start = 'class A:\n    def f(self):\n        """Two\n        lines."""\n'
    text = start + "        # a hint\n\n        x = 1\n        return x\n"
    assert cut(text, ["A.f"]) == start + "        raise NotImplementedError\n"


@pytest.mark.parametrize("name", BY_NAME)
def test_wrong_answers_are_in_the_bodies_to_write(name):
    assert 3 <= len(WRONG[name]) <= 5
    for wrong in WRONG[name]:
        file, old, *_ = wrong
        changed(engine_text(file), *wrong)
        assert cut(engine_text(file), BY_NAME[name].functions[file]).count(old) == 0, wrong


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_handout_is_a_page_and_says_how_much_is_to_write(exercise):
    page, num_lines = (ROOT / "exercises" / f"{exercise.name}.md").read_text(), 0
    assert page.startswith(f"# {exercise.title}\n") and page.count("<details>") == page.count("</details>") in (2, 3)
    assert 60 <= page.count("\n") <= 110 and max(map(len, page.split("\n"))) <= 120
    for file, names in exercise.functions.items():
        text = engine_text(file)
        assert file in page and all(name.split(".")[-1] in page for name in names)
        num_lines += text.count("\n") - cut(text, names).count("\n") + len(names)
    assert num_lines == pytest.approx(int(re.search(r"(\d+) lines \|", page)[1]), rel=0.35)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_listed_tests_exist(exercise):
    for file, _, name in (test.partition("::") for test in exercise.tests):
        assert not name or f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), (file, name)
