"""A lock-stepped group in virtual time: real coordinator, waves, schedulers and balancers on links of random delay."""

import functools
import heapq
import itertools
import random

import pytest

from dp_engine import wire
from dp_engine.balance import Balancer
from dp_engine.coordinator import Coordinator
from dp_engine.scheduler import Scheduler
from dp_engine.versions import wire_of
from dp_engine.waves import Waves
from dp_engine.wire import Outputs

STEP_S = 0.01
PATIENCE_S = 600.0  # virtual; everything ends within a minute when it ends at all


class FrontEnd:
    """One API server: its engines, what it last heard of the wave, and the requests that it waits for."""

    def __init__(self, *, index, count, engines, family):
        self.index = index
        self.engines = engines
        # Front ends that share all engines also share the balancing; those of other nodes have theirs for themselves.
        shared = len(engines) > 1 and count > 1
        self.balancer = Balancer(engines=len(engines), client=index if shared else 0, clients=count, wire=family)
        self.subscribed = False
        self.wave, self.running = 0, False
        self.unanswered = set()  # request ids
        self.position_of = {}  # request id: its engine's, until the engine itself says that it is finished
        self.engines_to_hear = set(engines)  # before the port opens


class Engine:
    """One rank. It reads nothing while it waits for the others in a step."""

    def __init__(self, *, rank, family):
        self.rank = rank
        self.waves = Waves(rank=rank, wire=family)
        self.scheduler = Scheduler(rank=rank, max_num_seqs=4, max_num_batched_tokens=64)
        self.ready = False
        self.in_step = False
        self.inbox = []
        self.told = (0, 0)


class Simulation:
    """Every message is late by a time of its own; only those between the same two parties keep their order."""

    def __init__(self, seed, version):
        self.random = random.Random(seed)
        self.family = wire_of(version)
        self.size = self.random.choice([2, 2, 3, 4, 5, 8, 16, 64])
        self.core = Coordinator(size=self.size, waves=True, wire_family=self.family)
        self.engines = [Engine(rank=rank, family=self.family) for rank in range(self.size)]
        count = self.random.randint(1, min(4, self.size))
        internal = self.random.random() < 0.6
        parts = [range(self.size)] * count if internal else self.slices(count)
        self.fronts = [
            FrontEnd(index=index, count=count, engines=list(part), family=self.family)
            for index, part in enumerate(parts)
        ]
        # Links differ: some are always slow, so that views are stale for many steps.
        self.slowness = {}
        self.now_s = 0.0
        self.events = []
        self.order = itertools.count()
        self.busy_until = {}
        self.ids = itertools.count()
        self.to_submit = 30

    def slices(self, count):
        cuts = sorted(self.random.sample(range(1, self.size), count - 1))
        return [range(first, end) for first, end in itertools.pairwise([0, *cuts, self.size])]

    # --- Time and links ---
    def at(self, delay_s, what):
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.order), what))

    def post(self, source, target, what):
        slowness = self.slowness.setdefault((source, target), self.random.choice([0.001, 0.02, 0.3, 2.0]))
        arrives_s = max(self.now_s + self.random.uniform(0, slowness), self.busy_until.get((source, target), 0.0))
        self.busy_until[source, target] = arrives_s
        self.at(arrives_s - self.now_s, what)

    # --- Coordinator ---
    def perform(self, sends):
        for send in sends:
            if send.to == "front":
                for front in self.fronts:
                    if front.subscribed:
                        self.post("core", ("front", front.index), functools.partial(self.heard, front, send.frames[0]))
            else:
                for engine in self.engines:
                    self.post("core", engine.rank, functools.partial(self.arrived, engine, send.frames))

    def publish(self):
        """The coordinator's own clock."""
        if self.core.started:
            self.perform(self.core.tick(self.now_s))
        self.at(self.core.timeout_s(self.now_s) or 0.1, self.publish)

    def to_core(self, engine, message):
        frame = wire.encode_outputs(message, now=self.now_s)
        self.post(engine.rank, "core", lambda: self.perform(self.core.from_engine(frame)))

    # --- Front ends ---
    def subscribe(self, front):
        front.subscribed = True

    def heard(self, front, frame):
        counts, front.wave, front.running = wire.decode(frame)
        if counts is not None:
            front.balancer.counts_received([counts[rank] for rank in front.engines])

    def submit(self, front):
        if not self.to_submit:
            return
        self.to_submit -= 1
        request_id = f"r{next(self.ids)}"
        position = front.balancer.pick()
        rank = front.engines[position]
        front.unanswered.add(request_id)
        front.position_of[request_id] = position
        frame = wire.encode_add(
            request_id=request_id,
            external_id=request_id,
            prompt_token_ids=[1] * self.random.randint(1, 100),
            sampling={"max_tokens": self.random.randint(1, 40), "ignore_eos": True},
            rank=None,
            client_index=front.index,
            wave=front.wave,
            layout=self.family.add_layout,
        )
        self.post(("front", front.index), rank, functools.partial(self.arrived, self.engines[rank], [wire.ADD, frame]))
        if self.family.front_end_starts_waves and not front.running:
            notice = wire.encode([wire.identity(rank), front.wave])
            self.post(("front", front.index), "core", lambda: self.perform(self.core.from_front(notice)))
        if self.random.random() < 0.2:
            self.at(self.random.choice([0.0, 0.01, 0.2, 1.0]), functools.partial(self.abort, front, request_id))
        # Bursts, lulls in which the group comes to rest, and everything between.
        self.at(self.random.choice([0.0, 0.005, 0.1, 0.5, 3.0]) * self.random.random(), self.next_request)

    def next_request(self):
        opened = [front for front in self.fronts if not front.engines_to_hear]
        self.submit(self.random.choice(opened))

    def abort(self, front, request_id):
        if request_id not in front.unanswered:
            return
        front.unanswered.remove(request_id)
        rank = front.engines[front.position_of[request_id]]
        frames = [wire.ABORT, wire.encode([request_id])]
        self.post(("front", front.index), rank, functools.partial(self.arrived, self.engines[rank], frames))

    def answered(self, front, message):
        for request_id in message.finished or ():
            front.unanswered.discard(request_id)
            front.balancer.finished(front.position_of.pop(request_id))

    def opens(self, front, rank):
        """An engine has answered the call that every front end makes before it listens."""
        front.engines_to_hear.discard(rank)
        first = all(other.engines_to_hear for other in self.fronts if other is not front)
        if not front.engines_to_hear and first:
            self.next_request()

    # --- Engines ---
    def arrived(self, engine, frames):
        if frames == [wire.COORDINATOR_READY]:
            engine.ready = True
            for front in self.fronts:
                if engine.rank in front.engines:
                    self.post(engine.rank, ("front", front.index), functools.partial(self.opens, front, engine.rank))
        else:
            engine.inbox.append(frames)
        self.turn(engine)

    def turn(self, engine):
        """One look at the inbox; then, with work, into the step that ends when all ranks are in it."""
        if engine.in_step or not engine.ready:
            return
        for kind, payload in engine.inbox:
            self.take(engine, kind, payload)
        engine.inbox.clear()
        self.tell_counts(engine)
        if engine.waves.running:
            engine.in_step = True
            if all(other.in_step for other in self.engines):
                self.at(STEP_S, self.step)

    def take(self, engine, kind, payload):
        announced = None
        if kind == wire.ADD:
            request = wire.decode_add(payload)
            engine.scheduler.add(request)
            announced = engine.waves.request_arrived(request.wave)
        elif kind == wire.ABORT:
            for client, ids in engine.scheduler.abort(wire.decode(payload)).items():
                self.to_front(engine, client, Outputs(engine=engine.rank, finished=ids))
        else:
            announced = engine.waves.start_received(*wire.decode(payload))
        if announced is not None:
            self.to_core(engine, Outputs(engine=engine.rank, start_wave=announced))

    def to_front(self, engine, client, message):
        front = self.fronts[client]
        self.post(engine.rank, ("front", client), functools.partial(self.answered, front, message))

    def tell_counts(self, engine):
        if engine.scheduler.counts != engine.told:
            engine.told = waiting, running = engine.scheduler.counts
            stats = {
                "num_waiting_reqs": waiting,
                "num_running_reqs": running,
                "current_wave": engine.waves.wave,
                "step_counter": engine.waves.step_counter,
            }
            self.to_core(engine, Outputs(engine=engine.rank, stats=stats))

    def step(self):
        """All ranks end the common step together."""
        outputs = [engine.scheduler.step() for engine in self.engines]
        unfinished = any(engine.scheduler.unfinished for engine in self.engines)
        for engine, messages in zip(self.engines, outputs, strict=True):
            for client, message in messages.items():
                self.to_front(engine, client, message)
            finished = engine.waves.stepped(any_unfinished=unfinished)
            if finished and finished.report is not None:
                self.to_core(engine, Outputs(engine=engine.rank, wave_complete=finished.report))
            engine.in_step = False
        for engine in self.engines:
            self.turn(engine)

    # --- A whole run ---
    def unfinished(self):
        return self.to_submit or any(front.unanswered for front in self.fronts)

    def at_rest(self):
        return not (self.core.running or any(engine.waves.running for engine in self.engines))

    def run(self):
        for _ in self.engines:
            self.at(self.random.uniform(0, 5), lambda: self.perform(self.core.from_back(wire.SUBSCRIBE, self.now_s)))
        for front in self.fronts:
            self.at(self.random.uniform(0, 8), functools.partial(self.subscribe, front))
        self.at(0.0, self.publish)
        # Half a minute after the last answer for what is still on its way and for the group to come to rest.
        rest_s = 30.0
        while self.unfinished() or rest_s > 0:
            before_s = self.now_s
            self.now_s, _, what = heapq.heappop(self.events)
            what()
            if not self.unfinished():
                rest_s -= self.now_s - before_s
            if self.now_s > PATIENCE_S:
                pytest.fail(f"after {PATIENCE_S:g} virtual seconds: {self.shown()}")

    def shown(self):
        waiting = {front.index: front.unanswered for front in self.fronts}
        ranks = [(engine.waves.wave, engine.waves.running, engine.scheduler.counts) for engine in self.engines]
        return (
            f"{len(self.fronts)} front ends, unanswered {waiting}, to submit {self.to_submit}; "
            f"coordinator wave {self.core.wave} running {self.core.running}; ranks (wave, running, counts) {ranks}"
        )


@pytest.mark.parametrize("version", ["0.11", "0.28", "0.29", "0.32", "0.33"])
@pytest.mark.parametrize("seed", range(30))
def test_no_request_waits_forever_in_a_paused_group_and_the_group_comes_to_rest(seed, version):
    simulation = Simulation(seed, version)
    simulation.run()
    assert simulation.at_rest(), simulation.shown()
    assert {engine.waves.wave for engine in simulation.engines} == {simulation.core.wave}
    assert not any(sum(front.balancer.in_flight) for front in simulation.fronts)
