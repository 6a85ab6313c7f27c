"""report.html of a run: one file without network that shows curves, volumes, memory, config and environment."""

from training.report.page import write_comparison, write_report
from training.report.volumes import ViewerVolume, save_viewer_volumes

__all__ = ["ViewerVolume", "save_viewer_volumes", "write_comparison", "write_report"]
