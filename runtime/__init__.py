"""Where and how code runs: devices, precision, processes, seeded randomness and named phases."""
