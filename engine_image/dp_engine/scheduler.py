"""Which requests run, which wait, and what one step gives: pure.

A step has a budget of tokens (--max-num-batched-tokens), as in vLLM: a running request costs one and yields one; a new
prompt costs its length, over several steps when the budget is small, and yields its first token with its last part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from dp_engine import logprobs
from dp_engine.tokens import END_OF_TEXT, natural_length, write
from dp_engine.wire import BLOCK_SIZE, NUM_BLOCKS, FinishReason, Outputs, Request


class _Job:
    """A request that is being answered."""

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self.request = request
        seed = sampling.get("seed")
        self.tokens: Iterator[int] = write(request.prompt_token_ids, seed)
        self.made = 0
        self.limit = max(int(sampling.get("max_tokens") or 16), 1)
        self.natural = None if sampling.get("ignore_eos") else natural_length(request.prompt_token_ids, seed)
        self.stops = set(sampling.get("stop_token_ids") or [])
        self.minimum = int(sampling.get("min_tokens") or 0)
        wanted = sampling.get("logprobs")
        self.logprobs = None if wanted is None else int(wanted)
        self.prompt_left = len(request.prompt_token_ids)

    def take(self, budget: int) -> tuple[int, bool]:
        """Spend at most `budget` tokens on this request. Returns (tokens spent, whether it yields a token)."""
        spent = min(self.prompt_left or 1, budget)
        if spent and self.prompt_left:
            self.prompt_left -= spent
        return spent, spent > 0 and self.prompt_left == 0

    def step(self) -> list[Any]:
        """One item of an outputs array."""
        at_end = self.natural is not None and self.made >= max(self.natural, self.minimum)
        token = END_OF_TEXT if at_end else next(self.tokens)
        self.made += 1
        reason: int | None = None
        stop_reason: int | None = None
        if at_end:
            reason = FinishReason.STOP
        elif token in self.stops and self.made >= self.minimum:
            reason, stop_reason = FinishReason.STOP, token
        elif self.made >= self.limit:
            reason = FinishReason.LENGTH
        return [
            self.request.request_id,
            [token],
            None if self.logprobs is None else logprobs.pack(logprobs.of_token(token, self.logprobs)),
            None,
            None,
            None if reason is None else int(reason),
            stop_reason,
        ]

    @property
    def held_blocks(self) -> int:
        return -(-(len(self.request.prompt_token_ids) + self.made) // BLOCK_SIZE)


class Scheduler:
    """At most `max_num_seqs` requests run at a time; the others wait in order of arrival."""

    def __init__(self, *, rank: int, max_num_seqs: int, max_num_batched_tokens: int = 2048) -> None:
        self._rank = rank
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._running: dict[str, _Job] = {}
        self._waiting: deque[_Job] = deque()

    @property
    def unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def counts(self) -> tuple[int, int]:
        """(waiting, running)."""
        return len(self._waiting), len(self._running)

    @property
    def kv_usage(self) -> float:
        """Share of the pretended KV cache in use, 0 to 1."""
        return min(1.0, sum(job.held_blocks for job in self._running.values()) / NUM_BLOCKS)

    def add(self, request: Request) -> None:
        self._waiting.append(_Job(request))

    def abort(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Forget these requests; unknown ids are ignored. Returns the ids that were known, by client index."""
        wanted = set(request_ids)
        known: dict[int, list[str]] = {}
        for job in [*self._running.values(), *self._waiting]:
            if job.request.request_id in wanted:
                known.setdefault(job.request.client_index, []).append(job.request.request_id)
        for request_id in wanted:
            self._running.pop(request_id, None)
        self._waiting = deque(job for job in self._waiting if job.request.request_id not in wanted)
        return known

    def abort_all(self) -> dict[int, list[str]]:
        jobs = [*self._running.values(), *self._waiting]
        return self.abort([job.request.request_id for job in jobs])

    def step(self) -> dict[int, Outputs]:
        """Give every running request one token, as far as the budget goes. Returns outputs by client index."""
        budget = self._max_num_batched_tokens
        items: dict[int, list[list[Any]]] = {}
        finished: dict[int, list[str]] = {}
        for request_id, job in self._admitted():
            spent, yields = job.take(budget)
            budget -= spent
            if not yields:
                continue
            item = job.step()
            client = job.request.client_index
            items.setdefault(client, []).append(item)
            if item[5] is not None:
                del self._running[request_id]
                finished.setdefault(client, []).append(request_id)
        return {
            client: Outputs(engine=self._rank, outputs=outputs, finished=finished.get(client))
            for client, outputs in items.items()
        }

    def _admitted(self) -> list[tuple[str, _Job]]:
        """What runs in this step: those that ran before come first, so prompts get what the others leave."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            job = self._waiting.popleft()
            self._running[job.request.request_id] = job
        return list(self._running.items())
