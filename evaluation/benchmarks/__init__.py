"""Our networks beside stock MONAI: the pieces of scripts/benchmark.py."""
