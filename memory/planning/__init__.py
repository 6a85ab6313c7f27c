"""From a folder of volumes and the size of a GPU to a config: fingerprint, choices, search, commented YAML."""
