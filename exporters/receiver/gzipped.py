"""gzip bodies, unpacked up to a bound."""

from __future__ import annotations

import asyncio
import zlib

_INLINE_BYTES = 64 * 1024
"""Up to here unpacking takes less than a thread switch is worth."""


class TooLargeError(ValueError):
    """What comes out is over the bound."""


def gunzip(body: bytes, limit: int) -> bytes:
    """The unpacked body. Never makes more than ``limit`` bytes of it.

    Raises TooLargeError over the limit, ValueError for what is no complete gzip stream. Several members are joined.
    """
    parts: list[bytes] = []
    left = limit
    rest = body
    while rest:
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            part = stream.decompress(rest, left + 1)
        except zlib.error as error:
            raise ValueError(f"the body is not gzip as it claims ({error})") from error
        if len(part) > left:
            raise TooLargeError(f"the body unpacks to more than {limit} bytes; send smaller batches")
        if not stream.eof:
            raise ValueError("the gzip body ends too early")
        parts.append(part)
        left -= len(part)
        rest = stream.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def unzip(body: bytes, limit: int) -> bytes:
    """``gunzip`` without holding up the event loop."""
    if len(body) <= _INLINE_BYTES:
        return gunzip(body, limit)
    return await asyncio.to_thread(gunzip, body, limit)
