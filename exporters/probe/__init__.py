"""The probe: runs inside the processes of a vLLM server; telemetry out, nothing else changed.

It imports the standard library, opentelemetry and prometheus_client, and vLLM only inside functions that vLLM calls.
Every hook catches everything; work that can wait goes through a bounded queue to one thread.
"""
