"""OTLP over gRPC and HTTP -> fsynced spool; must not know the lake: whoever starts it drains the spool."""
