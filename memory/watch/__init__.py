"""Memory of a real run: announce the prediction, log readings, and report or survive running out of memory."""
