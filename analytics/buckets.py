"""Context buckets: prompt tokens -> bucket name, by configuration, derived whenever data is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Buckets:
    """Names with their upper bound in tokens (inclusive), ascending.

    Prompts beyond the last bound still belong to the last bucket: nothing falls out of the statistics.
    An unknown prompt length has no bucket (null).
    """

    bounds: tuple[tuple[str, int], ...] = (("short", 4096), ("medium", 32768), ("long", 128000))

    @property
    def names(self) -> tuple[str, ...]:
        """Bucket names, smallest contexts first."""
        return tuple(name for name, _ in self.bounds)

    def of(self, tokens: pa.Array | pa.ChunkedArray) -> pa.Array:
        """The bucket name of each token count, null for null."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        values = tokens.combine_chunks() if isinstance(tokens, pa.ChunkedArray) else tokens
        uppers = np.array([bound for _, bound in self.bounds[:-1]], dtype=np.int64)
        index = np.searchsorted(uppers, pc.fill_null(values, 0).to_numpy(zero_copy_only=False), side="left")
        mask = pc.is_null(values).to_numpy(zero_copy_only=False)
        codes = pa.array(index.astype(np.int32), mask=mask)
        return pa.DictionaryArray.from_arrays(codes, pa.array(self.names)).cast(pa.string())

    def sql(self, column: str) -> str:
        """The same rule as a SQL expression over a column name."""
        branches = " ".join(f"when {column} <= {bound} then '{_quoted(name)}'" for name, bound in self.bounds[:-1])
        last = _quoted(self.bounds[-1][0])
        return f"case when {column} is null then null {branches} else '{last}' end"


def _quoted(text: str) -> str:
    return text.replace("'", "''")
