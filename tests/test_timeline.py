"""The page that shows a run: what it records is what happened, and the page needs nothing from outside."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import engine, random_ids

import timeline
from nanoengine import SamplingParams

ROOT = Path(__file__).parents[1]
COMMON = random_ids(700, 20)
PROMPTS = [COMMON + random_ids(701 + n, 3 + 4 * n) for n in range(5)] + [random_ids(710 + n, 9 * n + 2) for n in range(4)]


@pytest.fixture
def run(checkpoint, tmp_path):
    """(engine, recorder, outputs, text of the page) of a run with chunks, prefix hits and preemptions."""
    options = dict(num_kvcache_blocks=30, kvcache_block_size=4, max_num_batched_tokens=24, max_num_seqs=5)
    with engine(checkpoint("qwen3"), **options) as llm:
        params = [SamplingParams(temperature=0, max_tokens=10 + n, ignore_eos=True) for n in range(len(PROMPTS))]
        with timeline.recorded(llm, tmp_path / "run.html") as recorder:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        yield llm, recorder, outputs, (tmp_path / "run.html").read_text()


def test_every_computed_token_and_every_event_is_on_it(run):
    llm, recorder, outputs, _ = run
    stats, chunks = llm.stats(), [chunk for step in recorder.steps for chunk in step["chunks"]]
    assert len(recorder.steps) == stats["steps"] and recorder.num_lost == 0
    assert sum(count for _, _, count, _, _ in chunks) == stats["computed_tokens"]
    assert sum(draws for *_, draws, _ in chunks) == stats["output_tokens"] == sum(len(o.token_ids) for o in outputs)
    assert sum(len(step["preempted"]) for step in recorder.steps) == stats["preemptions"] > 0
    first = {}      # what each sequence found when it was first admitted
    for name, *_, cached in chunks:
        if cached is not None:
            first.setdefault(name, cached)
    assert [first[n] for n in range(len(PROMPTS))] == [output.num_cached_tokens for output in outputs]
    assert max(first.values()) > 0


def test_the_pool_is_whole_in_every_step(run):
    llm, recorder, _, _ = run
    for step in recorder.steps:
        assert not step["blocks"].keys() & set(step["cached"])
        for name, start, count, _, _ in step["chunks"]:
            held = sum(name in names for names in step["blocks"].values())
            assert held >= -(-(start + count) // 4)
    assert any(len(names) > 1 for step in recorder.steps for names in step["blocks"].values())  # shared


def test_the_page_holds_the_record_and_needs_nothing_else(run):
    _, recorder, _, page = run
    (data,) = re.findall(r"const run = (\{.*\}), steps", page)
    data = json.loads(data)
    assert data["steps"] == json.loads(json.dumps(recorder.steps))
    assert [s["prompt"] for s in data["sequences"]] == [len(prompt) for prompt in PROMPTS]
    outside = [match for match in re.findall(r"(?:src|href|url|import|fetch)\s*[=(:]\s*\S+|https?://\S+", page)
               if "www.w3.org/2000/svg" not in match]
    assert outside == []


def test_the_engine_is_as_before_however_the_block_ends(checkpoint, tmp_path):
    with engine(checkpoint("qwen3")) as llm:
        schedule = llm.scheduler.schedule
        with pytest.raises(KeyError), timeline.recorded(llm, tmp_path / "run.html"):
            llm.add_request([1, 2, 3], request_id="</script>")
            llm.step()
            raise KeyError
        assert llm.scheduler.schedule == schedule
        page = (tmp_path / "run.html").read_text()
        assert page.count("</script>") == 1     # an id can't end the page's script


def test_what_is_too_much_is_counted(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_STEPS", 3)
    with engine(checkpoint("qwen3")) as llm, timeline.recorded(llm, tmp_path / "run.html") as recorder:
        llm.generate([[1, 2]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert (len(recorder.steps), recorder.num_lost) == (3, 5)


def test_example_writes_one(chat_checkpoint, tmp_path):
    page = tmp_path / "page.html"
    done = subprocess.run([sys.executable, ROOT / "example.py", "--model", chat_checkpoint, "--trace", page,
                           "--max-tokens", "4", "--prompt", "hello"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "A run, step by step" in page.read_text()
