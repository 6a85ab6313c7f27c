"""YAML to validated settings. Imports neither torch nor monai, so that a typo is reported in under a second."""

from settings.autoencoder import AutoencoderSettings, AutoencoderTraining
from settings.data import DataSettings
from settings.errors import CheckpointError, ConfigError, DataError, Problem, TrainingError, UserError
from settings.ldm import LdmSettings
from settings.load import (
    dump_short,
    dump_with_origins,
    dump_yaml,
    known_keys,
    load_settings,
    read_overrides,
    restored,
    stored,
    validate,
)
from settings.root import DeviceSettings, Settings
from settings.section import TrainingSettings, look_up
