"""What one operator costs on a GPU: FLOPs, bytes moved, workspaces, and the time all of them take.

`gpus` and `timing` need no torch.
"""
