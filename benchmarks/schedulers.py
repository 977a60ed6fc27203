"""Real vLLM schedulers that run without a model: a step takes as long as a formula says, tokens are made up.

Runs under an interpreter that has vLLM (`VLLM_SLO_VLLM_PYTHON`), with this folder on the path; imports nothing of the
product, so that whoever wants the probe installs it first. `Scheduler` and `AsyncScheduler`, the request queues, the
KV-cache manager and its block pool are vLLM's own; only the forward pass is missing.

    with virtual_time() as clock:                      # before the probe is imported; without it time is real
        engine = Engine(Shape(asynchronous=True, max_num_seqs=64), clock)
        engine.add(prompt_tokens=100, output_tokens=16)
        engine.run()                                   # until nothing is left; or engine.step() by step
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STOP_TOKEN = 2
PLAIN_TOKEN = 5


@dataclass(frozen=True)
class Shape:
    """What vLLM would be started with; ``in_flight`` steps are scheduled before the first result is awaited."""

    asynchronous: bool = False
    in_flight: int = 2
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_model_len: int = 65536
    num_blocks: int = 4096
    block_size: int = 16
    policy: str = "fcfs"
    prefix_caching: bool = True
    draft_tokens: int = 0
    log_stats: bool = True
    scheduler: dict[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's SchedulerConfig."""


def make_scheduler(shape: Shape) -> Any:
    """A scheduler with a KV-cache manager of one full-attention group."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=shape.max_model_len
        )
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=shape.block_size, enable_prefix_caching=shape.prefix_caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=shape.max_num_seqs,
                max_num_batched_tokens=shape.max_num_batched_tokens,
                max_model_len=shape.max_model_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                policy=shape.policy,
                async_scheduling=shape.asynchronous,
                **shape.scheduler,
            ),
            device_config=DeviceConfig("cpu"),
            speculative_config=SpeculativeConfig(
                method="ngram_gpu" if shape.asynchronous else "ngram", num_speculative_tokens=shape.draft_tokens
            )
            if shape.draft_tokens
            else None,
        )
        # The CPU platform switches it off while the configuration is checked; a GPU would not.
        config.scheduler_config.async_scheduling = shape.asynchronous
        config.cache_config.num_gpu_blocks = shape.num_blocks
        group = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=shape.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        )
        scheduler_class = AsyncScheduler if shape.asynchronous else Scheduler
        return scheduler_class(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=shape.num_blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=shape.block_size,
            log_stats=shape.log_stats,
        )


class RequestFactory:
    """Makes requests as the engine core does from what the front end sends; ids look like vLLM's internal ones."""

    def __init__(self, block_size: int, prefix_caching: bool) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256) if prefix_caching else None
        self.made = 0

    def make(
        self,
        prompt_tokens: int | Sequence[int],
        output_tokens: int,
        *,
        priority: int = 0,
        request_id: str | None = None,
        trace_headers: dict[str, str] | None = None,
        arrival_time: float | None = None,
        ignore_eos: bool = True,
    ) -> Any:
        """A request; a prompt given as a length is unlike every other, so that the prefix cache never helps."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.made += 1
        if isinstance(prompt_tokens, int):
            # The number of the request is written in front, in base 1000.
            first = [3 + self.made // 1000**power % 1000 for power in range(3)]
            prompt = (first + [7] * prompt_tokens)[: max(1, prompt_tokens)]
        else:
            prompt = list(prompt_tokens)
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=ignore_eos, temperature=0.0)
        sampling.update_from_generation_config({}, STOP_TOKEN)
        return Request(
            request_id=request_id or f"cmpl-{self.made:032x}-0-{self.made & 0xFFFFFFFF:08x}",
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            priority=priority,
            trace_headers=trace_headers,
            arrival_time=arrival_time,
            block_hasher=self._hasher,
        )


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of a forward pass. The defaults are those of the tiny model on a CPU, decode 4 ms, 2,048 tokens
    0.2 s."""

    base_ns: int = 3_500_000
    prefill_token_ns: int = 100_000
    decode_ns: int = 120_000

    def of(self, prefill_tokens: int, decode_sequences: int) -> int:
        """Length of a step; one with nothing scheduled costs nothing."""
        if prefill_tokens + decode_sequences == 0:
            return 0
        return self.base_ns + prefill_tokens * self.prefill_token_ns + decode_sequences * self.decode_ns


class RealTime:
    """Time passes by itself; a forward pass is slept through where ``sleep`` is on, else it takes no time."""

    def __init__(self, sleep: bool = True) -> None:
        self._sleep = sleep

    def now_ns(self) -> int:
        """Of `time.monotonic_ns`."""
        return time.monotonic_ns()

    def until(self, at_ns: int) -> None:
        """Returns at that time, at once where forward passes take no time."""
        if self._sleep and (left := at_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)

    def pass_ns(self, nanoseconds: int) -> None:
        """Lets time pass."""
        self.until(self.now_ns() + nanoseconds)


class VirtualTime:
    """Time that moves only when told to, and by 1 µs at each reading, so that no two events coincide."""

    def __init__(self, start_ns: int = 1_000_000_000_000, wall_ns: int = 1_800_000_000_000_000_000) -> None:
        self._now = start_ns
        self._wall_offset = wall_ns - start_ns

    def now_ns(self) -> int:
        """The time, 1 µs later than at the last reading."""
        self._now += 1_000
        return self._now

    def wall_ns(self) -> int:
        """Nanoseconds since the epoch; reading it moves no time."""
        return self._now + self._wall_offset

    def until(self, at_ns: int) -> None:
        """Moves on to that time, unless it is past."""
        self._now = max(self._now, at_ns)

    def pass_ns(self, nanoseconds: int) -> None:
        """Moves on."""
        self._now += nanoseconds


@contextmanager
def virtual_time() -> Iterator[VirtualTime]:
    """The clocks of module `time` follow the one yielded.

    Whoever binds `time.monotonic_ns` to a name of his own keeps what it was then: import him inside. Waiting threads
    keep real time, since `threading` bound its clock long before.
    """
    clock = VirtualTime()
    names = ("monotonic", "monotonic_ns", "time", "time_ns")
    before = {name: getattr(time, name) for name in names}
    time.monotonic_ns = clock.now_ns
    time.monotonic = lambda: clock.now_ns() / 1e9
    time.time_ns = clock.wall_ns
    time.time = lambda: clock.wall_ns() / 1e9
    try:
        yield clock
    finally:
        for name, function in before.items():
            setattr(time, name, function)


@dataclass
class _InFlight:
    output: Any
    result: Any
    done_ns: int


class Engine:
    """The loop of vLLM's engine core around a scheduler: `step` without and `step_with_batch_queue` with asynchronous
    scheduling, the forward pass replaced by ``cost``."""

    def __init__(
        self, shape: Shape, clock: RealTime | VirtualTime, cost: Cost | None = None, scheduler: Any = None
    ) -> None:
        self.shape, self.clock, self.cost = shape, clock, cost or Cost()
        self.scheduler = make_scheduler(shape) if scheduler is None else scheduler
        self.requests = RequestFactory(shape.block_size, shape.prefix_caching)
        self.depth = shape.in_flight if shape.asynchronous else 1
        self.finished: dict[str, str] = {}
        """Engine request id -> finish reason, those ended by `abort` not among them, as in vLLM."""
        self.outputs: list[tuple[int, str, int]] = []
        """(when the update had returned, engine request id, new tokens), where ``keep_outputs``."""
        self.keep_outputs = False
        self.next_token: Callable[[str], int] = lambda _request_id: PLAIN_TOKEN
        self.accepted_drafts = 1
        self._queue: deque[_InFlight] = deque()
        self._aborts: list[str] = []
        self._device_free_ns = 0

    def add(self, prompt_tokens: int | Sequence[int], output_tokens: int, **more: Any) -> str:
        """Queues a request and returns its engine request id."""
        request = self.requests.make(prompt_tokens, output_tokens, **more)
        self.scheduler.add_request(request)
        return str(request.request_id)

    def abort(self, request_id: str, *, during_step: bool = False) -> None:
        """As if the client went away: at once, or just before the next update as vLLM does in the middle of a step."""
        if during_step:
            self._aborts.append(request_id)
        else:
            self._finish([request_id])

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._queue) or bool(self.scheduler.has_requests())

    def step(self) -> None:
        """Schedules, and awaits the oldest result unless another step may be scheduled first."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._queue.append(self._start(output))
            executed = output.total_num_scheduled_tokens > 0
            if len(self._queue) < self.depth and (executed or self.scheduler.has_requests()):
                return
        if not self._queue:
            return
        step = self._queue.popleft()
        self.clock.until(step.done_ns)
        if self._aborts:
            self._finish(self._aborts)
            self._aborts = []
        self._record(self.scheduler.update_from_output(step.output, step.result))

    def run(self, steps: int = 1_000_000) -> int:
        """Steps until nothing is left or ``steps`` are done; how many that were."""
        for done in range(steps):
            if not self.busy:
                return done
            self.step()
        return steps

    def _finish(self, request_ids: list[str]) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def _start(self, output: Any) -> _InFlight:
        """What the model runner would return, and when."""
        from vllm.v1.outputs import ModelRunnerOutput

        requests, drafts = self.scheduler.requests, output.scheduled_spec_decode_tokens
        prefill_tokens = decoding = 0
        ids: list[str] = []
        sampled: list[list[int]] = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = requests[request_id]
            before = request.num_computed_tokens - tokens
            if before < request.num_prompt_tokens or tokens > 1 + len(drafts.get(request_id, ())):
                prefill_tokens += tokens
            else:
                decoding += 1
            ids.append(request_id)
            count = 1 + min(self.accepted_drafts, len(drafts.get(request_id, ())))
            sampled.append([] if request.is_prefill_chunk else [self.next_token(request_id)] * count)
        now = self.clock.now_ns()
        self._device_free_ns = max(now, self._device_free_ns) + self.cost.of(prefill_tokens, decoding)
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: index for index, name in enumerate(ids)}, sampled_token_ids=sampled
        )
        return _InFlight(output, result, self._device_free_ns)

    def _record(self, by_client: dict[int, Any]) -> None:
        now = self.clock.now_ns() if self.keep_outputs else 0
        for outputs in by_client.values():
            for output in outputs.outputs:
                if self.keep_outputs:
                    self.outputs.append((now, output.request_id, len(output.new_token_ids)))
                if output.finish_reason is not None:
                    self.finished[output.request_id] = str(output.finish_reason)
        if self.shape.draft_tokens and not self.shape.asynchronous:
            self._propose_drafts()

    def _propose_drafts(self) -> None:
        from vllm.v1.outputs import DraftTokenIds

        decoding = [r.request_id for r in self.scheduler.running if not r.is_prefill_chunk]
        proposal = [[PLAIN_TOKEN] * self.shape.draft_tokens for _ in decoding]
        self.scheduler.update_draft_token_ids(DraftTokenIds(decoding, proposal))
