"""Files -> OTLP bodies or rows: every form of telemetry that people keep. Must not know: the lake."""
