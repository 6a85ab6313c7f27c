"""report.html of a run: one file that needs no network and shows curves, volumes, memory, config and environment."""

from report.page import publish, write_comparison, write_report

__all__ = ["publish", "write_comparison", "write_report"]
