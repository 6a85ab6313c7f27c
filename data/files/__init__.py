"""Readers of the file formats: headers without voxels, and voxels as they are stored."""
