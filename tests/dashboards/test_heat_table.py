from __future__ import annotations

import re

import pytest

from vllm_slo.analytics.percentiles import Cell, PercentileTable
from vllm_slo.dashboards.heat_table import MOST_SHARDS, heat_table
from vllm_slo.dashboards.palette import DARK, LIGHT, Palette


def cell(bucket: str | None, shard: str | None, rows: int, p99: float) -> Cell:
    return Cell(bucket, shard, rows, (p99 / 8, p99 / 4, p99 / 2, p99), p99 * 1.5)


def table(cells: list[Cell], metric: str = "queue") -> PercentileTable:
    shards = sorted({c.shard for c in cells}, key=str)
    by_shard = tuple(cell(None, s, sum(c.rows for c in cells if c.shard == s), 1.0) for s in shards)
    buckets = sorted({c.bucket for c in cells}, key=str)
    by_bucket = tuple(cell(b, None, sum(c.rows for c in cells if c.bucket == b), 1.0) for b in buckets)
    overall = cell(None, None, sum(c.rows for c in cells), 1.0)
    return PercentileTable(metric, "rows", tuple(cells), by_bucket, by_shard, overall)


def cells_of(html: str) -> dict[str, str]:
    """Place -> text of the cell."""
    found = re.findall(r"<td([^>]*)>(.*?)</td>", html)
    return {
        re.search(r"data-cell='([^']*)'", attributes)[1]: re.sub(r"<[^>]+>", " ", text).split("\n")[0].strip()  # type: ignore[index]
        for attributes, text in found
    }


def test_a_cell_gives_figure_and_count_and_the_worst_is_marked_in_words() -> None:
    html = heat_table(
        table([cell("short", "a", 2000, 2.0), cell("short", "b", 1000, 0.5)]), 0.99, 3000, 0, ["short"], LIGHT
    )
    cells = cells_of(html)
    assert cells["a|short"].split() == ["2.00", "s", "n=2,000", "▲", "worst"]
    assert cells["b|short"].split() == ["500", "ms", "n=1,000"]


def test_pointing_at_a_cell_gives_only_percentiles_with_enough_requests() -> None:
    html = heat_table(table([cell("short", "a", 150, 2.0)]), 0.5, 150, 0, ["short"], LIGHT)
    assert "title='n=150 · P50 250 ms · P90 500 ms · max 3.00 s'" in html


def test_a_missing_combination_says_no_data_and_a_thin_one_how_thin_it_is() -> None:
    thin = cell("long", "a", 37, 4.0)
    html = heat_table(table([cell("short", "a", 2000, 2.0), thin]), 0.99, 2037, 0, ["short", "medium", "long"], LIGHT)
    cells = cells_of(html)
    assert cells["a|medium"] == "no data"
    assert " ".join(cells["a|long"].split()) == "max 6.00 s n=37, too few for P99"
    assert "worst" not in html, "one cell alone is not the worst of anything"


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_slower_cells_are_further_along_the_ramp_and_text_stays_readable(palette: Palette) -> None:
    def luminance(colour: str) -> float:
        values = (
            [int(v) for v in re.findall(r"\d+", colour)]
            if colour.startswith("rgb")
            else [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        )
        return sum(w * (v / 255) ** 2.2 for w, v in zip((0.2126, 0.7152, 0.0722), values, strict=True))

    shades = [palette.shade(i / 20) for i in range(21)]
    lights = [luminance(background) for background, _ in shades]
    assert lights == sorted(lights, reverse=palette is LIGHT)
    for background, text in shades:
        low, high = sorted((luminance(background), luminance(text)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, "WCAG 2 AA"


def test_names_are_shown_as_text() -> None:
    html = heat_table(table([cell("<b>", "<script>'\"", 2000, 2.0)]), 0.99, 2000, 0, [], LIGHT)
    assert "<script>" not in html
    assert "<b>" not in html


def test_many_shards_are_cut_to_the_busiest_and_the_cut_is_told() -> None:
    cells = [cell("short", f"s{i:03d}", 1000 + i, 1.0) for i in range(MOST_SHARDS + 5)]
    html = heat_table(table(cells), 0.99, 9, 0, ["short"], LIGHT)
    shown = {place.split("|")[0] for place in cells_of(html)} - {"all"}
    assert shown == {f"s{i:03d}" for i in range(5, MOST_SHARDS + 5)}
    assert "5 more in the totals" in html


def test_the_note_says_what_was_used_and_how_exact_it_is() -> None:
    found = table([cell("short", "a", 2000, 2.0)], "time_per_output_token")
    html = heat_table(found, 0.99, 2300, 12, ["short"], LIGHT)
    assert "2,000 requests used, 12 left out · 300 with fewer than two tokens have none · exact" in html
    rough = PercentileTable(found.metric, "rollups", found.cells, found.by_bucket, found.by_shard, found.overall)
    assert "from rollups, ±1.1 %" in heat_table(rough, 0.99, 2000, 0, ["short"], LIGHT)
