"""Whether a request bears the token, found out in constant time."""

from __future__ import annotations

import hmac


def bears(authorization: str | bytes, token: str) -> bool:
    """Whether an ``Authorization`` value is ``Bearer <token>``; the scheme in any case."""
    value = authorization if isinstance(authorization, bytes) else authorization.encode("utf-8", "replace")
    scheme, _, found = value.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(found.strip(), token.encode())
