"""MONAI's blocks with the same parameters and the same function in less memory."""
