"""The network edge: OTLP/gRPC and OTLP/HTTP in, fsynced spool segments out, acknowledgement only in between."""
