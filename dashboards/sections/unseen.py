"""What no figure of the page can show, where no server of the selection has the probe."""

from __future__ import annotations

from vllm_slo.dashboards.sections.view import View, section
from vllm_slo.dashboards.units import count_text


def unseen(view: View) -> None:
    """One short section in place of those that need the probe: unknown is neither good nor zero."""
    section(
        "unseen",
        "Not visible without the probe",
        f"What blocked the queue, what preemption cost, and requests that were given up, failed or were refused: "
        f"unknown. All {count_text(view.counts.requests)} requests of this selection are known from stock spans alone. "
        "pip install vllm-slo beside vLLM adds them; vllm-slo doctor says whether it runs.",
    )
