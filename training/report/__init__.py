"""report.html of a run: one file without network that shows curves, volumes, memory, config and environment."""

from training.report.page import publish, write_comparison, write_report
from training.report.volumes import Preview, ViewerVolume, save_viewer_volumes

__all__ = ["Preview", "ViewerVolume", "publish", "save_viewer_volumes", "write_comparison", "write_report"]
