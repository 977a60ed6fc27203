"""What a vLLM server says of itself on ``/metrics``: engine samples, configuration, finished-request counters."""
