"""Write report.html of a run, one offline page, as the train scripts do after each validation."""

from evaluation.report.page import publish, show_validation, write_comparison, write_report

__all__ = ["publish", "show_validation", "write_comparison", "write_report"]
