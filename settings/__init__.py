"""YAML to validated settings. Imports neither torch nor monai, so that a typo is reported in under a second."""

from settings.autoencoder import AutoencoderSettings, AutoencoderTraining, PerceptualSettings
from settings.data import DataSettings
from settings.errors import CheckpointError, ConfigError, DataError, Problem, TrainingError, UserError
from settings.ldm import LdmSettings, LdmTraining
from settings.load import known_keys, load_settings, read_overrides, restored, stored, validate
from settings.root import DeviceSettings, Settings
from settings.section import TrainingSettings, has_key, look_up
from settings.writing import dump_short, dump_with_origins, dump_yaml

__all__ = [
    "AutoencoderSettings",
    "AutoencoderTraining",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DataSettings",
    "DeviceSettings",
    "LdmSettings",
    "LdmTraining",
    "PerceptualSettings",
    "Problem",
    "Settings",
    "TrainingError",
    "TrainingSettings",
    "UserError",
    "dump_short",
    "dump_with_origins",
    "dump_yaml",
    "has_key",
    "known_keys",
    "load_settings",
    "look_up",
    "read_overrides",
    "restored",
    "stored",
    "validate",
]
