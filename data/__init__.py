"""From files to tensors: discovery, preparation, transforms, step-addressed batches, phantoms.

Finding and checking volumes needs no torch; `data.batches` and `data.loading` do.
"""

from data.geometry import NETWORK_RANGE
from data.volumes import DataSplit, VolumeFile, prepare_volumes
