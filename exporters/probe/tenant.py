"""A request's tenant out of one HTTP header. It goes into records only; it is never a label of a series."""

from __future__ import annotations

from hashlib import blake2b

LONGEST = 128
"""Characters of a tenant's name that are kept: whoever puts a document into the header does not fill the lake."""
SALT_BYTES = 64
"""BLAKE2's longest key."""


def tenant_of(value: bytes, hashed: bool, salt: bytes = b"") -> str | None:
    """The tenant as it is recorded; null for an empty header.

    ``hashed``: 16 hex digits that the same name gives in every process with the same ``salt``. Without a salt whoever
    knows a tenant's name can find its hash.
    """
    name = value.strip()
    if not name:
        return None
    if hashed:
        return blake2b(name, digest_size=8, key=salt[:SALT_BYTES]).hexdigest()
    text = name.decode("utf-8", "replace")[:LONGEST]
    return "".join(character if character.isprintable() else "?" for character in text)
