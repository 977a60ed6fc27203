"""The one style sheet of the pages."""

from __future__ import annotations

from vllm_slo.dashboards.palette import Palette


def stylesheet(palette: Palette) -> str:
    """A <style> element for the HTML parts of a page."""
    return f"""<style>
.block-container {{ padding-top: 2.6rem; max-width: 1440px; }}
.slo-title {{ display: flex; flex-wrap: wrap; align-items: baseline; gap: .2rem 1rem; color: {palette.text}; }}
.slo-title h2 {{ font-size: 1.7rem; font-weight: 650; padding: 0; margin: 0; letter-spacing: -.01em; }}
.slo-title span {{ color: {palette.quiet}; font-size: .95rem; }}
.slo-section {{ color: {palette.text}; border-top: 1px solid {palette.line}; padding-top: .9rem; margin-top: .4rem; }}
.slo-section h3 {{ font-size: 1.15rem; font-weight: 650; padding: 0; margin: 0; }}
.slo-section p {{ color: {palette.quiet}; font-size: .86rem; margin: .15rem 0 0; max-width: 120ch; }}
.slo-tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
  border: 1px solid {palette.line}; border-radius: .5rem; overflow: hidden; }}
.slo-tiles .tile {{ padding: .7rem .9rem; display: flex; flex-direction: column;
  box-shadow: 1px 1px 0 {palette.line}; }}
.slo-tiles .label {{ color: {palette.quiet}; font-size: .82rem; }}
.slo-tiles .figure {{ color: {palette.text}; font-size: 1.55rem; font-weight: 600; line-height: 1.35;
  font-variant-numeric: tabular-nums; }}
.slo-tiles .figure small {{ font-size: .8rem; font-weight: 500; color: {palette.quiet}; margin-left: .4em; }}
.slo-tiles .under {{ color: {palette.quiet}; font-size: .8rem; }}
.slo-heats {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr));
  gap: 1.1rem 1.6rem; }}
.slo-heat {{ min-width: 0; }}
.slo-heat h4 {{ font-size: .95rem; font-weight: 600; padding: 0 0 .35rem; margin: 0; color: {palette.text}; }}
.slo-heat .scroll, .slo-health .scroll {{ overflow-x: auto; }}
.slo-heat table {{ border-collapse: separate; border-spacing: 2px; width: 100%; margin: 0; border: none;
  font-variant-numeric: tabular-nums; color: {palette.text}; }}
.slo-heat th, .slo-heat td {{ border: none; padding: .3rem .5rem; text-align: center; line-height: 1.25; }}
.slo-heat thead th {{ color: {palette.quiet}; font-weight: 500; font-size: .8rem; padding-bottom: .1rem; }}
.slo-heat thead th:first-child {{ text-align: left; padding-left: 0; }}
.slo-heat tbody th {{ text-align: left; font-weight: 500; font-size: .84rem; white-space: nowrap; padding-left: 0; }}
.slo-heat td {{ border-radius: .25rem; min-width: 5.2rem; }}
.slo-heat .value {{ display: block; font-size: .98rem; font-weight: 600; white-space: nowrap; }}
.slo-heat .n {{ display: block; font-size: .72rem; opacity: .92; }}
.slo-heat .worst {{ font-weight: 700; margin-left: .4em; white-space: nowrap; }}
.slo-heat td.few {{ border: 1px dashed {palette.line}; color: {palette.quiet}; }}
.slo-heat td.few .value {{ font-weight: 450; font-size: .88rem; }}
.slo-heat td.none {{ color: {palette.quiet}; font-size: .8rem; }}
.slo-heat td:last-child, .slo-heat tr.total td {{ background: none; }}
.slo-heat tr.total td, .slo-heat tr.total th {{ border-top: 1px solid {palette.line}; border-radius: 0; }}
.slo-heat .note, .slo-note {{ color: {palette.quiet}; font-size: .8rem; margin: .25rem 0 0; }}
.slo-health {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, max(300px, 40%)), 1fr));
  gap: .9rem 2.2rem; }}
.slo-health table {{ width: 100%; border: none; border-collapse: collapse; font-size: .86rem; color: {palette.text};
  font-variant-numeric: tabular-nums; }}
.slo-health caption {{ caption-side: top; text-align: left; font-weight: 600; font-size: .95rem; color: {palette.text};
  padding: 0 0 .3rem; }}
.slo-heats.wide {{ grid-template-columns: 1fr; }}
.slo-heats.wide .value {{ display: inline; margin-right: .5em; }}
.slo-heat .why {{ font-size: .84rem; white-space: nowrap; }}
@media (max-width: 1000px) {{
  .slo-heats.wide .value, .slo-heats.wide .why {{ display: block; white-space: normal; margin: 0; }}
}}
.slo-figures {{ overflow-x: auto; }}
.slo-figures table {{ border: none; border-collapse: collapse; font-size: .84rem; color: {palette.text};
  font-variant-numeric: tabular-nums; }}
.slo-figures th, .slo-figures td {{ border: none; padding: .25rem .9rem .25rem 0; text-align: right; font-weight: 400;
  white-space: nowrap; }}
.slo-figures thead th {{ color: {palette.quiet}; }}
.slo-figures thead th:first-child {{ text-align: left; }}
.slo-figures tbody tr {{ border-top: 1px solid {palette.line}; }}
.slo-figures tbody th {{ text-align: left; }}
.slo-events table {{ border: none; border-collapse: collapse; font-size: .86rem; color: {palette.text};
  font-variant-numeric: tabular-nums; }}
.slo-events th, .slo-events td {{ border: none; padding: .2rem 1.4rem .2rem 0; text-align: left; font-weight: 400; }}
.slo-events th {{ color: {palette.quiet}; }}
.slo-health th, .slo-health td {{ border: none; border-top: 1px solid {palette.line}; padding: .3rem .2rem; }}
.slo-health th {{ text-align: left; font-weight: 400; color: {palette.quiet}; }}
.slo-health td {{ text-align: right; font-weight: 500; }}
.slo-help {{ max-width: 92ch; color: {palette.text}; font-size: 1rem; line-height: 1.55; }}
.slo-help pre {{ background: none; border: 1px solid {palette.line}; border-radius: .4rem; padding: .7rem .9rem;
  font-size: .88rem; color: {palette.text}; overflow-x: auto; }}
</style>"""
