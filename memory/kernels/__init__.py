"""What one operator costs on a GPU or a CPU: FLOPs, bytes moved, workspaces, and the time all of them take.

`gpus` needs no torch.
"""
