"""Generates what documents, presets and READMEs say about settings and predictions."""
