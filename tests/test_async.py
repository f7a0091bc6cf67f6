"""Which step is launched, waited for and taken in when, as an engine's ranks see it. A tiny model."""

import pytest

from nanoengine import SamplingParams
from tiny import assert_same_tokens, engine, oracle_for, random_ids


class Watched:
    """An engine's ranks, with a record of who was asked what: ("run", n) the nth step, ("wait", n) for its tokens."""

    def __init__(self, ranks):
        self.ranks, self.events, self.launches = ranks, [], []

    def __getattr__(self, name):
        return getattr(self.ranks, name)

    def call(self, method, *args):
        self.events.append((method, len(self.launches)))
        self.launches.append(self.ranks.call(method, *args))
        return self.launches[-1]

    def token_ids(self, launch):
        self.events.append(("wait", next(n for n, one in enumerate(self.launches) if one is launch)))
        return self.ranks.token_ids(launch)


@pytest.fixture
def watched(checkpoint):
    """watched(is_async) -> (a tiny engine, the record of its calls)."""
    engines = []

    def make(is_async):
        engines.append(engine(checkpoint("llama"), async_scheduling=is_async))
        llm = engines[-1].__enter__()
        llm._ranks = Watched(llm._ranks)
        return llm, llm._ranks.events

    yield make
    for one in engines:
        one.__exit__(None, None, None)


def three_tokens(**options):
    return SamplingParams(temperature=0.0, max_tokens=3, **options)


def test_at_once_every_step_is_waited_for_before_the_next(watched):
    llm, events = watched(False)
    llm.add_request([1, 2, 3], three_tokens())
    outputs = [len(llm.step()) for _ in range(3)]
    assert events == [("run", 0), ("wait", 0), ("run", 1), ("wait", 1), ("run", 2), ("wait", 2)]
    assert outputs == [0, 0, 1] and not llm.has_unfinished()


def test_the_next_step_is_launched_before_the_last_one_is_waited_for(watched):
    llm, events = watched(True)
    llm.add_request([1, 2, 3], three_tokens())
    outputs = [len(llm.step()) for _ in range(4)]
    assert events == [("run", 0), ("run", 1), ("wait", 0), ("run", 2), ("wait", 1), ("wait", 2)]
    assert outputs == [0, 0, 0, 1] and not llm.has_unfinished()


def test_an_idle_step_launches_nothing(watched):
    for is_async in (True, False):
        llm, events = watched(is_async)
        assert llm.step() == llm.step() == [] and events == []


@pytest.mark.parametrize("is_async, num_steps", [(True, 3), (False, 2)])
def test_a_stop_token_is_seen_when_its_step_is_taken_in(watched, checkpoint, is_async, num_steps):
    prompt = [1, 2, 3]
    second = oracle_for(checkpoint("llama"), prompt, three_tokens()).token_ids[1]
    llm, events = watched(is_async)
    llm.add_request(prompt, three_tokens(stop_token_ids=[second]))
    outputs = [output for _ in range(num_steps) for output in llm.step()]
    assert [(output.finish_reason, len(output.token_ids)) for output in outputs] == [("stop", 2)]
    assert events.count(("run", 2)) == is_async  # launched before anybody knew; its token is dropped
    llm.step()
    assert not llm.has_unfinished() and llm.scheduler.block_manager.num_free_blocks == 256


@pytest.mark.parametrize("is_async", [True, False])
def test_on_step_sees_each_step_that_is_taken_in(watched, is_async):
    llm, _ = watched(is_async)
    seen = []
    llm.on_step = lambda chunks, launch: seen.append(([(c.start, c.num_tokens) for c in chunks], launch))
    llm.generate([[1, 2, 3]], three_tokens(), use_tqdm=False)
    assert [chunks for chunks, _ in seen] == [[(0, 3)], [(3, 1)], [(4, 1)]]
    assert [launch for _, launch in seen] == llm._ranks.launches
    assert llm.stats()["steps"] == 3 and llm.stats()["computed_tokens"] == 5 and llm.stats()["output_tokens"] == 3


@pytest.mark.parametrize("is_async", [True, False])
def test_a_launch_that_fails_ends_its_own_requests(watched, checkpoint, is_async, caplog):
    llm, events = watched(is_async)
    prompts, good = [random_ids(5, 4), random_ids(6, 6)], llm._ranks.ranks
    llm.add_request(prompts[0], three_tokens(), "doomed")

    class Bad:
        failure = None

        def call(self, *_):
            raise RuntimeError("no memory")

    llm._ranks.ranks = Bad()
    outputs = llm.step()
    llm._ranks.ranks = good
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("doomed", "error")]
    assert "no memory" in caplog.text
    llm._ranks.launches.clear(), events.clear()
    assert_same_tokens(
        llm.generate([prompts[1]], three_tokens(), use_tqdm=False)[0],
        oracle_for(checkpoint("llama"), prompts[1], three_tokens()),
    )
