"""The parts of stage 2 other than its training loop.

A latent passes through these files: frozen_autoencoder and volume_codec encode volumes, latents prepares, scales and
batches them, latent_files keeps them, noise_process adds noise, sampling draws new ones.
"""
