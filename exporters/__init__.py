"""vLLM and GPUs -> telemetry.

In: OTLP spans over gRPC and HTTP, vLLM's own ``/metrics``. Out: durable spool segments and Arrow tables in the columns
of ``schema``. Must not know: how tables are stored, queried or drawn. ``schema`` and ``conventions`` are the vocabulary
that every other package may import; the rest is reached only through ``vllm_slo.commands``.
"""
