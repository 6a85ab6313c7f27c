"""From a folder of volumes and a budget to a config."""
