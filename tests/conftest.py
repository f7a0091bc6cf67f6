"""Settings for the whole suite: no network, one torch thread, and markers for what needs a GPU.

pytest rewrites asserts of test files into `if not ...: raise`, so they count under `python -O` as well; the
warning that it then gives is about helpers. tiny.py is registered for rewriting too, and raises anyway.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

pytest.register_assert_rewrite("tiny")
import tiny  # noqa: E402

MARKERS = {
    "gpu": "needs a CUDA device",
    "gpu2": "needs two CUDA devices",
    "slow": "left out of CI; run with -m slow",
}


def pytest_configure(config):
    torch.set_num_threads(1)
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if not __debug__ and config.getoption("assertmode") == "plain":
        raise pytest.UsageError("python -O with --assert=plain checks nothing")


def pytest_collection_modifyitems(config, items):
    num_gpus = torch.cuda.device_count()
    for item in items:
        if "gpu2" in item.keywords and num_gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, there are {num_gpus}"))
        elif "gpu" in item.keywords and num_gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter):
    """Comparisons that stopped early are counted, so that a suite that compares little doesn't look green."""
    if tiny.COUNTS["compared"]:
        terminalreporter.write_line(
            f"oracle: {tiny.COUNTS['compared']} outputs compared, "
            f"{tiny.COUNTS['stopped']} of them only up to a near-tie"
        )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(family, **options) -> folder of a tiny checkpoint, made once. Not to be edited."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(family, **options):
        key = (family, repr(sorted(options.items())))
        if key not in made:
            made[key] = tiny.tiny_checkpoint(root / f"{family}-{len(made)}", family, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def chat_checkpoint(tmp_path_factory):
    """A tiny Llama with a byte-level tokenizer and a chat template beside it (vocab 384); don't edit it."""
    folder = tmp_path_factory.mktemp("chat") / "llama"
    tiny.tiny_checkpoint(folder, "llama", vocab_size=384, seed=3)
    return tiny.tiny_tokenizer(folder)
