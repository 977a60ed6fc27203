"""Telemetry -> numbers.

In: Arrow tables in the columns of ``exporters.schema``. Out: the lake (Delta tables), read-only DuckDB connections over
it, and plain results (percentiles, phases, coverage, quality counts). Must not know: sockets, wire formats, pictures.
"""
