"""Names that others chose: OpenTelemetry and vLLM. One file, because they mislead and because they move.

Span attributes are those of vLLM 0.32 and 0.33 (`gen_ai.*` is in development; vLLM writes the older names).
"""

from __future__ import annotations

REQUEST_SPAN_NAME = "llm_request"
VLLM_SCOPE_PREFIX = "vllm"

REQUEST_ID = "gen_ai.request.id"
PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
REQUEST_DURATION = "gen_ai.latency.e2e"
QUEUE = "gen_ai.latency.time_in_queue"
PREFILL = "gen_ai.latency.time_in_model_prefill"
DECODE = "gen_ai.latency.time_in_model_decode"
INFERENCE = "gen_ai.latency.time_in_model_inference"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
N = "gen_ai.request.n"

SECONDS_ATTRIBUTES: dict[str, str] = {
    TIME_TO_FIRST_TOKEN: "time_to_first_token_seconds",
    REQUEST_DURATION: "request_duration_seconds",
    QUEUE: "queue_seconds",
    PREFILL: "prefill_seconds",
    DECODE: "decode_seconds",
}
"""Span attribute -> column of `requests`, in seconds."""
INTEGER_ATTRIBUTES: dict[str, str] = {
    PROMPT_TOKENS: "prompt_tokens",
    COMPLETION_TOKENS: "completion_tokens",
    MAX_TOKENS: "max_tokens",
    N: "n",
}
REAL_ATTRIBUTES: dict[str, str] = {TEMPERATURE: "temperature", TOP_P: "top_p"}
TEXT_ATTRIBUTES: dict[str, str] = {REQUEST_ID: "request_id"}
DERIVABLE_ATTRIBUTES: frozenset[str] = frozenset({INFERENCE})
"""Attributes not stored because others give them: inference = prefill + decode."""
REQUIRED_COLUMNS: tuple[str, ...] = (
    "prompt_tokens",
    "completion_tokens",
    "time_to_first_token_seconds",
    "request_duration_seconds",
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
)
"""Columns that vLLM always writes; a row without one is marked `missing_milestone`."""

SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
SHARD = "vllm.shard"
MODEL = "vllm.model"
PROCESS_KIND = "vllm.process_kind"
INSTRUMENTING_MODULE = "vllm.instrumenting_module_name"

SPAN_KINDS: tuple[str, ...] = ("unspecified", "internal", "server", "client", "producer", "consumer")
SPAN_STATUSES: tuple[str, ...] = ("unset", "ok", "error")

PROMPT_TEXT_ATTRIBUTES: tuple[str, ...] = (
    "gen_ai.prompt*",
    "gen_ai.completion*",
    "gen_ai.input.messages*",
    "gen_ai.output.messages*",
    "gen_ai.system_instructions*",
    "gen_ai.tool.call.arguments*",
    "gen_ai.tool.call.result*",
    "gen_ai.content.*",
    "gen_ai.event.content",
    "gen_ai.retrieval.documents*",
    "gen_ai.retrieval.query*",
    "input.value",
    "output.value",
    "llm.input_messages*",
    "llm.output_messages*",
    "llm.prompts*",
    "llm.completions*",
    "llm.prompt_template*",
    "llm.function_call*",
    "retrieval.documents*",
    "reranker.query*",
    "reranker.input_documents*",
    "reranker.output_documents*",
    "embedding.text*",
    "embedding.embeddings*",
    "document.content*",
    "message.content*",
    "ai.prompt*",
    "ai.response.text*",
    "ai.response.object*",
    "ai.response.toolCalls*",
    "ai.toolCall.args*",
    "ai.toolCall.result*",
    "traceloop.entity.input",
    "traceloop.entity.output",
    "langfuse.observation.input",
    "langfuse.observation.output",
    "langfuse.trace.input",
    "langfuse.trace.output",
)
"""Attribute keys (shell patterns) that carry what users wrote or were told. Dropped, on spans, events, links,
scopes and resources alike, before anything is kept. Sources: OpenTelemetry gen_ai semantic conventions 1.28-1.37,
OpenInference, OpenLLMetry, Langfuse, Vercel's AI SDK. `gen_ai.usage.prompt_tokens` and its like are counts and are not
matched."""
