"""What will be missing or wrong in the telemetry of one vLLM server, each with the cure.

A check is one row of ``checks.CHECKS``: a pure function over a ``Subject`` (metrics page, version, command line,
environment). ``look`` is the edge that reads a server; everything else is data in, data out.
"""
