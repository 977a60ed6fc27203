"""gzip bodies, unpacked up to a bound."""

from __future__ import annotations

import asyncio
import zlib

_INLINE_BYTES = 64 * 1024
"""Up to here unpacking takes less than a thread switch is worth."""
_BLOCK_BYTES = 64 * 1024
"""Bytes handed to zlib at once: at the end of a member it copies what is left of them."""
_MOST_MEMBERS = 1024
"""gzip members of one body. Tools that compress in blocks write one for every 64 KiB; each costs set-up time."""


class TooLargeError(ValueError):
    """What comes out is over the bound."""


def gunzip(body: bytes, limit: int) -> bytes:
    """The unpacked body. Never makes more than ``limit`` bytes of it.

    Raises TooLargeError over the limit, ValueError for what is no complete gzip stream and for a flood of members.
    Several members are joined.
    """
    view = memoryview(body)
    parts: list[bytes] = []
    left, position, members = limit, 0, 0
    while position < len(view):
        members += 1
        if members > _MOST_MEMBERS:
            raise ValueError(f"the gzip body has more than {_MOST_MEMBERS} members; send one")
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        while not stream.eof:
            block = view[position : position + _BLOCK_BYTES]
            if not block:
                raise ValueError("the gzip body ends too early")
            try:
                part = stream.decompress(block, left + 1)
            except zlib.error as error:
                raise ValueError(f"the body is not gzip as it claims ({error})") from error
            if len(part) > left:
                raise TooLargeError(f"the body unpacks to more than {limit} bytes; send smaller batches")
            parts.append(part)
            left -= len(part)
            position += len(block) - len(stream.unused_data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def unzip(body: bytes, limit: int) -> bytes:
    """``gunzip`` without holding up the event loop."""
    if len(body) <= _INLINE_BYTES:
        return gunzip(body, limit)
    return await asyncio.to_thread(gunzip, body, limit)
