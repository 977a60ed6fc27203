"""OTLP bodies (protobuf, JSON) -> rows in the columns of ``schema``; pure: bytes in, Arrow tables and refusals out."""
