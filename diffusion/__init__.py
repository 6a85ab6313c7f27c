"""Stage 2 without its loop: the noise process, sampling, conditioning, the pixel loss and the latents."""
