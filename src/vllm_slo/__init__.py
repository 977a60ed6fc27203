"""Observability and SLO analytics for vLLM servers.

Four packages, data flowing one way: ``exporters`` (vLLM, GPU -> telemetry), ``analytics`` (telemetry -> numbers),
``alerts`` (SLOs and numbers -> decisions), ``dashboards`` (numbers -> pictures). ``commands`` wire them.
"""

__version__ = "0.1.0"
