"""Write report.html of a run: one offline page with curves, volumes, memory, config and environment.

Called by the train scripts after each validation, and by `scripts/report.py`.
"""

from evaluation.report.page import publish, show_validation, write_comparison, write_report

__all__ = ["publish", "show_validation", "write_comparison", "write_report"]
