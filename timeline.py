"""Watch an engine at work: records every step and writes a page that shows them, without outside resources.

    with timeline.recorded(llm, "run.html"):
        llm.generate(...)

What a step computed is known when the scheduler has chosen it, so the recorder stands between the engine and
`Scheduler.schedule`: the engine itself needs no hook for it. A sequence's name here is its number of arrival.
"""

import contextlib
import json
import time
from pathlib import Path

MAX_STEPS = 5000    # a page of some 10 MB; later steps are counted, not kept


class Recorder:
    """Keeps, for each step: when it was chosen, its chunks, who was preempted, and who holds which block."""

    def __init__(self, llm):
        self.llm, self.schedule, self.start = llm, llm.scheduler.schedule, time.perf_counter()
        self.steps, self.names, self.sequences, self.num_lost = [], {}, [], 0

    def name(self, sequence) -> int:
        if id(sequence) not in self.names:
            self.names[id(sequence)] = len(self.sequences)
            self.sequences.append(sequence)
        return self.names[id(sequence)]

    def __call__(self):
        """Takes the place of `Scheduler.schedule`."""
        scheduler, manager = self.llm.scheduler, self.llm.scheduler.block_manager
        for sequence in (*scheduler.running, *scheduler.waiting):
            self.name(sequence)
        running = list(scheduler.running)
        chunks = self.schedule()
        if len(self.steps) >= MAX_STEPS:
            self.num_lost += bool(chunks)
            return chunks
        owners = [[] for _ in range(manager.num_blocks)]
        for sequence in scheduler.running:
            for block_id in sequence.block_table:
                owners[block_id].append(self.name(sequence))
        cached = [block_id for block_id in manager.index.values() if block_id in manager.free_blocks]
        if chunks:
            self.steps.append({
                "ms": round(1e3 * (time.perf_counter() - self.start), 3),
                # sequence, first token, tokens, draws one?, cached tokens found when it was admitted now (or null)
                "chunks": [(self.name(c.sequence), c.start, c.num_tokens, int(c.draws_token),
                            c.start if c.is_new_row else None) for c in chunks],
                "preempted": [self.name(s) for s in running if s not in scheduler.running],
                "waiting": [self.name(s) for s in scheduler.waiting],
                "blocks": {block_id: names for block_id, names in enumerate(owners) if names}, "cached": cached})
        return chunks

    def page(self) -> str:
        """The whole page: data and the script that draws it."""
        manager = self.llm.scheduler.block_manager
        data = {"steps": self.steps, "num_lost": self.num_lost, "num_blocks": manager.num_blocks,
                "block_size": manager.block_size, "end": round(1e3 * (time.perf_counter() - self.start), 3),
                "sequences": [{"id": s.request_id, "prompt": s.num_prompt_tokens, "tokens": len(s.token_ids),
                               "finish": s.finish_reason} for s in self.sequences]}
        template = Path(__file__).with_name("timeline.html").read_text(encoding="utf-8")
        return template.replace("/*DATA*/null", json.dumps(data).replace("<", "\\u003c"))


@contextlib.contextmanager
def recorded(llm, file):
    """Record all steps inside the block, then write the page to `file`, however the block ends."""
    recorder = Recorder(llm)
    llm.scheduler.schedule = recorder
    try:
        yield recorder
    finally:
        del llm.scheduler.schedule      # the class's own again
        Path(file).write_text(recorder.page(), encoding="utf-8")
