"""Prepares each volume once: one pass measures it, checks it, and keeps it on the network's grid for later."""
