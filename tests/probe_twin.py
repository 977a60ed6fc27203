"""A scheduler that does anything at random, and a twin of the accounting that keeps everything and sums it directly."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm_slo.exporters.probe import blocked
from vllm_slo.exporters.probe.accounting import Accounting
from vllm_slo.exporters.probe.life import Life
from vllm_slo.exporters.probe.steps import Chunk


class Told:
    """An observer that writes everything down."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.calls.append((name, *(dict(v) if isinstance(v, dict) else v for v in values)))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@dataclass
class Ran:
    """A step with its execution."""

    start: int
    tokens: int
    prefill: int
    decoding: int
    own: dict[str, int]
    began: int = 0
    end: int = 0
    tick_from: int = 0


@dataclass
class Scan:
    """A schedule call, and what it found."""

    at: int
    reason: int = blocked.NOTHING
    head: str | None = None
    blocker: str | None = None


@dataclass
class Stay:
    """A stretch of one life in one state; `deferred` only in the queue."""

    state: str
    start: int
    end: int = 0
    deferred: str | None = None


@dataclass
class Fate:
    """What the simulation knows of one request."""

    name: str
    arrival: int
    stays: list[Stay]
    session: bool = False
    turns_left: int = 0
    left: int = 0
    """Prompt (or lost) tokens to be scheduled."""
    computed: int = 0
    prompt: int = 0
    target: int = 0
    outputs: int = 0
    turn_token: bool = False
    first_token: int = 0
    scheduled: int = 0
    end: int = 0
    reason: str = ""
    lost: int = 0
    recomputed: int = 0
    cached_at_resume: int = 0
    preemptions: int = 0
    output_times: list[int] = field(default_factory=list)
    life: Life | None = None

    @property
    def state(self) -> str:
        return self.stays[-1].state

    def move(self, state: str, now: int, deferred: str | None = None) -> None:
        self.stays[-1].end = now
        self.stays.append(Stay(state, now, deferred=deferred))


class Chaos:
    """Drives an Accounting through a random but possible history, and records it."""

    def __init__(self, random: Random, depth: int) -> None:
        self.random, self.depth = random, depth
        self.now = random.randrange(1, 10**9)
        self.told = Told()
        self.ended: list[Life] = []
        self.accounting = Accounting(self.told, self.ended.append)
        self.fates: dict[str, Fate] = {}
        self.steps: list[Ran] = []
        self.scans: list[Scan] = []
        self.idle_until: list[tuple[int, int]] = []
        self.pipeline: list[tuple[Ran, list[tuple[str, int, bool, int]], object]] = []
        self.last_end = 0

    def pass_time(self, most: int = 1_000_000) -> int:
        self.now += self.random.randrange(1, most)
        return self.now

    def alive(self, *states: str) -> list[Fate]:
        return [fate for fate in self.fates.values() if fate.state in states]

    def add(self) -> None:
        name = f"r{len(self.fates)}"
        now = self.pass_time()
        session = self.random.random() < 0.15
        fate = Fate(name, now, [Stay("queued", now)], session=session, turns_left=self.random.randrange(1, 4))
        fate.prompt = fate.left = self.random.randrange(1, 50)
        fate.life = Life(name, now, arrival_ns=now - 7, cell=("short", len(self.fates) % 2))
        self.fates[name] = fate
        self.accounting.added(fate.life)

    def abort(self, fate: Fate, in_update: int = 0) -> None:
        now = in_update or self.pass_time()
        if fate.state == "recompute":
            fate.recomputed += max(0, min(fate.computed, fate.target) - fate.cached_at_resume)
        fate.move("ended", now)
        fate.end, fate.reason = now, "abort"
        self.accounting.ended(fate.life, now, "abort", fate.computed)

    def preempt(self, fate: Fate, at: int) -> None:
        lost = fate.computed
        if fate.state == "recompute":
            fate.recomputed += max(0, min(lost, fate.target) - fate.cached_at_resume)
            fate.target = max(fate.target, lost)
        else:
            fate.target = lost
        fate.lost += lost
        fate.preemptions += 1
        fate.move("preempted", at)
        self.accounting.preempted(fate.life, self.now, lost, "kv_blocks")

    def schedule(self) -> None:
        random, accounting = self.random, self.accounting
        at = self.pass_time()
        idle = not self.alive("prefill", "decode", "recompute") and not self.pipeline
        if idle:
            self.idle_until.append((self.last_end, at))
            self.last_end = at
        scan = Scan(at)
        self.scans.append(scan)
        accounting.schedule_begins(at)
        self.pass_time(1000)
        preempted = False
        for fate in self.alive("prefill", "decode", "recompute"):
            if random.random() < 0.08 and not preempted:
                self.preempt(fate, at)
                preempted = True
        if not preempted:
            for fate in self.alive("queued", "preempted"):
                chance = random.random()
                if fate.stays[-1].deferred == "streaming":
                    accounting.looked_at(fate.life, "streaming")
                elif chance < 0.15:
                    reason = random.choice(("grammar", "lora"))
                    accounting.looked_at(fate.life, reason)
                    if fate.state == "queued" and fate.stays[-1].deferred != reason:
                        fate.move("queued", at, deferred=reason)
                elif chance < 0.6:
                    self.admit(fate, at)
                elif chance < 0.8 and fate.stays[-1].deferred is None:
                    break
        own: list[tuple[str, int, bool, int]] = []
        chunks = []
        for life in list(accounting.prefilling):
            fate = self.fates[life.engine_request_id]
            tokens = random.randrange(0, fate.left + 1)
            if not tokens:
                continue
            fate.left -= tokens
            fate.computed += tokens
            own.append((fate.name, tokens, fate.left == 0, fate.preemptions))
            chunks.append(Chunk(life, tokens, fate.computed, fate.left == 0))
        decoders = [fate for fate in self.alive("decode") if random.random() < 0.95]
        for fate in decoders:
            fate.computed += 1
        prefill = sum(tokens for _, tokens, _, _ in own)
        ran = Ran(at, prefill + len(decoders), prefill, len(decoders), {name: tokens for name, tokens, _, _ in own})
        waiting = [fate for fate in self.alive("queued") if fate.stays[-1].deferred is None]
        if waiting:
            scan.reason = random.randrange(1, 6)
            head = random.choice([*waiting, None])
            scan.head = head.name if head else None
            scan.blocker = random.choice(["b0", "b1", None])
        key = object()
        accounting.schedule_ends(
            key,
            ran.tokens,
            len(own) + len(decoders),
            chunks,
            scan.reason,
            self.fates[scan.head].life if scan.head else None,
            scan.blocker,
        )
        self.steps.append(ran)
        self.pipeline.append((ran, own, key))

    def admit(self, fate: Fate, at: int) -> None:
        if fate.state == "queued":
            fate.scheduled = fate.scheduled or at
            fate.computed = self.random.randrange(0, fate.left)
            fate.left -= fate.computed
            fate.move("prefill", at)
        else:
            total = max(fate.target, fate.prompt) + 1
            fate.computed = fate.cached_at_resume = self.random.randrange(0, total)
            fate.left = total - fate.computed
            fate.move("recompute", at)
        self.accounting.admitted(fate.life, fate.computed)

    def update(self) -> None:
        random, accounting = self.random, self.accounting
        ran, own, key = self.pipeline.pop(0)
        if random.random() < 0.1 and (victims := self.alive("queued", "prefill", "decode", "preempted", "recompute")):
            self.abort(random.choice(victims))
        accounting.in_update = True
        now = self.pass_time(8_000_000 if random.random() < 0.9 else 60_000_000)
        ran.began, ran.end, ran.tick_from = max(ran.start, self.last_end), now, self.last_end
        self.last_end = now
        arrived = []
        enders: list[Fate] = [fate for fate in self.alive("decode") if random.random() < 0.1]
        decoders = self.alive("decode")
        for name, _, last, preemptions in own:
            fate = self.fates[name]
            stale = fate.preemptions != preemptions
            if fate.state == "recompute" and not fate.turn_token and not stale and fate.computed >= fate.target:
                # Its computed tokens may be those of a later step already: the step's own count decides.
                done = self.computed_in(own, ran, name)
                if done >= fate.target:
                    fate.recomputed += max(0, fate.target - fate.cached_at_resume)
                    fate.move("prefill", now)
            if last and fate.life in accounting.awaiting and (not stale or fate.state == "preempted"):
                if fate.state == "preempted" and fate.turn_token:
                    continue
                arrived.append(fate)
        for fate in decoders:
            fate.output_times.append(now)
        for fate in arrived:
            self.token(fate, now)
            if random.random() < 0.2 and fate.state != "preempted":
                enders.append(fate)
        for fate in enders:
            if fate.session and fate.turns_left:
                fate.turns_left -= 1
                waits = random.random() < 0.6
                fate.prompt = fate.left = random.randrange(1, 30)
                fate.turn_token = False
                fate.move("queued", now, deferred="streaming" if waits else None)
                accounting.paused_session(fate.life, 3, waits)
            else:
                fate.move("ended", now)
                fate.end, fate.reason = now, "stop"
                accounting.ended(fate.life, now, "stop", fate.computed)
        if random.random() < 0.05 and (victims := self.alive("queued", "prefill", "decode", "preempted", "recompute")):
            self.abort(random.choice(victims), in_update=now)
        accounting.update_ends(key, now, [fate.life for fate in arrived])

    def computed_in(self, own: list[tuple[str, int, bool, int]], ran: Ran, name: str) -> int:
        """Computed tokens of a request after that step: what later steps in flight added is taken off."""
        later = sum(tokens for _, others, _ in self.pipeline for other, tokens, _, _ in others if other == name)
        return self.fates[name].computed - later

    def token(self, fate: Fate, now: int) -> None:
        fate.output_times.append(now)
        if fate.state == "recompute":
            fate.recomputed += max(0, fate.target - fate.cached_at_resume)
        if not fate.turn_token:
            fate.turn_token = True
            fate.first_token = fate.first_token or now
            if fate.state == "preempted":
                fate.move("preempted", now)
                fate.stays[-1].deferred = "after"
        if fate.state != "preempted":
            fate.move("decode", now)

    def session_input(self) -> None:
        waiting = [fate for fate in self.alive("queued") if fate.stays[-1].deferred == "streaming"]
        if waiting:
            fate = self.random.choice(waiting)
            now = self.pass_time()
            fate.move("queued", now)
            self.accounting.session_goes_on(fate.life, now)

    def run(self, events: int) -> None:
        for _ in range(events):
            chance = self.random.random()
            if chance < 0.25:
                self.add()
            elif chance < 0.3 and (alive := self.alive("queued", "prefill", "decode", "preempted", "recompute")):
                self.abort(self.random.choice(alive))
            elif chance < 0.4:
                self.session_input()
            elif len(self.pipeline) < self.depth and chance < 0.8:
                self.schedule()
            elif self.pipeline:
                self.update()
        while self.pipeline:
            self.update()
        for fate in self.alive("queued", "prefill", "decode", "preempted", "recompute"):
            self.abort(fate)


class Twin:
    """The parts of a life summed from the whole record, interval by interval."""

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos
        self.split = self._decode_split()

    def _decode_split(self) -> dict[int, tuple[int, int, int]]:
        """End of a step -> its length as work, slowdown, interference."""
        means: dict[int, int] = {}
        seen: dict[int, int] = {}
        split = {}
        for ran in sorted((ran for ran in self.chaos.steps if ran.end), key=lambda ran: ran.end):
            length = ran.end - ran.tick_from
            if not ran.decoding:
                split[ran.end] = (0, 0, length) if ran.prefill else (0, length, 0)
                continue
            size = 0
            while 2**size < ran.decoding:
                size += 1
            smallest = means[min(means)] if means else 0
            of = [means[c] for c in sorted(means) if c <= size]
            mean = max(of[-1], smallest) if of else smallest
            if not ran.prefill:
                work = min(length, smallest) if means else length
                split[ran.end] = (work, length - work, 0)
                if size not in means:
                    means[size] = length
                elif seen[size] < 8:
                    means[size] = min(means[size], length)
                else:
                    means[size] += (min(length, 2 * means[size]) - means[size]) // 16
                seen[size] = seen.get(size, 0) + 1
            elif means:
                work = min(length, smallest)
                slow = min(length - work, mean - smallest)
                split[ran.end] = (work, slow, length - work - slow)
            else:
                interference = length * ran.prefill // ran.tokens
                split[ran.end] = (length - interference, 0, interference)
        return split

    def parts(self, fate: Fate) -> dict[str, int]:
        out = dict.fromkeys(
            [
                "step",
                "sequence_cap",
                "token_budget",
                "kv_blocks",
                "grammar",
                "lora",
                "streaming",
                "encoder",
                "paused",
                "head",
                "own",
                "interference",
                "other",
                "work",
                "slowdown",
                "decode_interference",
                "preempted",
                "preempted_before",
                "recompute",
                "recompute_before",
            ],
            0,
        )
        turn_token = False
        for stay in fate.stays:
            if stay.state == "queued":
                turn_token = False
                self._queued(fate, stay, out)
            elif stay.state == "prefill":
                self._prefill(fate, stay, out)
            elif stay.state == "decode":
                turn_token = True
                self._decode(stay, out)
            elif stay.state in ("preempted", "recompute"):
                turn_token = turn_token or stay.deferred == "after"
                out[stay.state] += stay.end - stay.start
                if not turn_token:
                    out[f"{stay.state}_before"] += stay.end - stay.start
        return out

    def _queued(self, fate: Fate, stay: Stay, out: dict[str, int]) -> None:
        if stay.deferred:
            out[stay.deferred] += stay.end - stay.start
            return
        scans = self.chaos.scans
        looked = stay is not fate.stays[0] and fate.stays[fate.stays.index(stay) - 1].deferred in ("grammar", "lora")
        first = stay.start if looked else min((s.at for s in scans if s.at >= stay.start), default=stay.end)
        first = min(first, stay.end)
        out["step"] += first - stay.start
        for scan, after in zip(scans, [*[s.at for s in scans[1:]], 1 << 62], strict=False):
            since, until = max(scan.at, first), min(after, stay.end)
            if until <= since:
                continue
            out["step" if scan.reason == blocked.NOTHING else blocked.REASONS[scan.reason]] += until - since
            if scan.head == fate.name:
                out["head"] += until - since

    def _prefill(self, fate: Fate, stay: Stay, out: dict[str, int]) -> None:
        own = interference = 0
        for ran in self.chaos.steps:
            if not ran.prefill or not ran.end or ran.end > stay.end or ran.end <= stay.start:
                continue
            share = (ran.end - ran.began) * ran.prefill // ran.tokens
            if ran.began < stay.start:
                share -= (stay.start - ran.began) * ran.prefill // ran.tokens
            mine = 0
            if fate.name in ran.own and ran.start >= self._admitted(fate, stay):
                mine = (ran.end - ran.began) * ran.own[fate.name] // ran.tokens
            own += mine
            interference += share - mine
        out["own"] += own
        out["interference"] += interference
        out["other"] += stay.end - stay.start - own - interference

    @staticmethod
    def _admitted(fate: Fate, stay: Stay) -> int:
        """When it was last scheduled: steps before are of an earlier admission."""
        index = fate.stays.index(stay)
        if index and fate.stays[index - 1].state == "recompute":
            return fate.stays[index - 1].start
        return stay.start

    def _decode(self, stay: Stay, out: dict[str, int]) -> None:
        last = stay.start
        for ran in self.chaos.steps:
            if ran.end and stay.start < ran.end <= stay.end:
                work, slow, interference = self.split[ran.end]
                out["work"] += work
                out["slowdown"] += slow
                out["decode_interference"] += interference
        for since, until in self.chaos.idle_until:
            if stay.start <= since and until <= stay.end:
                out["slowdown"] += until - since
        ends = [ran.end for ran in self.chaos.steps if stay.start < ran.end <= stay.end]
        ends += [until for since, until in self.chaos.idle_until if stay.start < until <= stay.end]
        last = max([stay.start, *ends])
        out["slowdown"] += stay.end - last
