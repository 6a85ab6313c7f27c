"""Import torchvision even if its compiled operators were built for another torch.

A torchvision wheel built for CUDA next to a CPU build of torch fails on import with "operator torchvision::nms does not
exist". The image networks need none of the compiled operators, so declaring the two that the import looks up is enough.
"""

import importlib
import sys
from types import ModuleType

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# The declarations exist only as long as the library object.
_declarations: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Return torchvision; declare the missing operators only if its import fails without them."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _declarations.append(library)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")
