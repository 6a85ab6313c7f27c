"""The noise process of stage 2: how a clean latent becomes noise, and what the U-Net predicts.

Every process here is x(t) = signal(t) * clean + noise_level(t) * noise, so one sampler works for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion.conditioning import ConditionBatch
from settings.ldm import SchedulerSettings

# Below this signal, dividing by it to recover the clean latent would only amplify the error of the predicted noise.
SMALLEST_SIGNAL = 0.01

FIRST_BETA, LAST_BETA = 0.0015, 0.0195
"""The ends of the scaled_linear_beta schedule, as in MONAI's tutorials and in MAISI."""


class NoiseProcess:
    """Denoising diffusion (epsilon or v) over discrete timesteps, or rectified flow over continuous time.

    Times are in the units of the U-Net's input: 0 is clean, `num_train_timesteps` is noise. Latents are never clipped.
    """

    def __init__(self, s: SchedulerSettings, device: torch.device) -> None:
        self.is_flow = s.type == "rflow"
        self.prediction = "flow" if self.is_flow else s.prediction
        self.num_timesteps = s.num_train_timesteps
        self.device = device
        self.time_shift = s.time_shift
        kept = np.ones(1) if self.is_flow else _kept_variance(s)
        # Even the first timestep may be noise, and is sampled from then.
        self.num_usable = max(1, int((np.sqrt(kept) >= SMALLEST_SIGNAL).sum()))
        self._signal = torch.tensor(np.sqrt(kept), dtype=torch.float32).to(device)
        self._noise_level = torch.tensor(np.sqrt(1 - kept), dtype=torch.float32).to(device)
        # Not from the tensors, which hold no data while memory is predicted.
        self._angles = np.arctan2(np.sqrt(1 - kept), np.sqrt(kept))

    def times(self, uniform: Tensor) -> Tensor:
        """Map numbers in [0, 1) linearly to times."""
        if self.is_flow:
            return uniform * self.num_timesteps
        return (uniform * self.num_timesteps).long().clamp_max(self.num_timesteps - 1)

    def training_times(self, uniform: Tensor) -> Tensor:
        """Map uniform numbers in [0, 1) to the times that training draws.

        A `time_shift` moves them towards noise (Esser et al. 2024, equation 23).
        """
        return self.times(uniform if self.time_shift == 1 else self._shifted(uniform))

    def _shifted(self, share: Any) -> Any:
        """Return where shares of the time in [0, 1] come to lie: latents with more voxels need more noise to hide."""
        return self.time_shift * share / (1 + (self.time_shift - 1) * share)

    def coefficients(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return the signal and noise level at each time, shaped to broadcast over (B, C, D, H, W)."""
        if self.is_flow:
            level = times.float() / self.num_timesteps
            signal = 1 - level
        else:
            signal, level = self._signal[times], self._noise_level[times]
        return signal.view(-1, 1, 1, 1, 1), level.view(-1, 1, 1, 1, 1)

    def add_noise(self, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the noisy latent at each time."""
        signal, level = self.coefficients(times)
        return signal * clean + level * noise

    def target(self, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return what the U-Net should predict."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "flow":
            return clean - noise
        signal, level = self.coefficients(times)
        return signal * noise - level * clean

    def clean_and_noise(self, prediction: Tensor, noisy: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clean latent and the noise that a prediction implies."""
        signal, level = self.coefficients(times)
        if self.prediction == "epsilon":
            return (noisy - level * prediction) / signal, prediction
        if self.prediction == "flow":
            return noisy + level * prediction, noisy - signal * prediction
        return signal * noisy - level * prediction, level * noisy + signal * prediction

    def clean_slope(self, times: Tensor) -> Tensor:
        """Return the absolute derivative of the implied clean latent with respect to the prediction."""
        signal, level = self.coefficients(times)
        return level / signal if self.prediction == "epsilon" else level

    def sampling_times(self, num_steps: int) -> list[float]:
        """Return the times of the sampler's steps, from noise to clean; the last step ends at the clean latent."""
        if self.is_flow:
            shares = [1 - step / num_steps for step in range(num_steps)]
            return [self.num_timesteps * (share if self.time_shift == 1 else self._shifted(share)) for share in shares]
        last = self.num_usable - 1
        return np.linspace(last, 0, num_steps).round().tolist() if num_steps > 1 else [float(last)]

    def sampling_times_by_angle(self, num_steps: int) -> list[float]:
        """Return times between which the angle atan(noise level / signal) falls by equal amounts, the last to clean.

        They are closer together near the clean latent than equal steps in time, so a second-order sampler needs fewer.
        """
        largest = np.pi / 2 if self.is_flow else self._angles[self.num_usable - 1]
        return self._times_at(largest * np.arange(num_steps, 0, -1) / num_steps).tolist()

    def times_by_angle(self, angles: Sequence[float]) -> Tensor:
        """Return the times at which the angle atan(noise level / signal) has these values, or the nearest ones."""
        dtype = torch.float32 if self.is_flow else torch.int64
        return torch.tensor(self._times_at(np.array(angles)), device=self.device).to(dtype)

    def angles_near(self, angles: Sequence[float]) -> list[float]:
        """Return the angles at those times, which differ from the wanted ones where the schedule does not have them."""
        return list(angles) if self.is_flow else self._angles[self._times_at(np.array(angles)).astype(int)].tolist()

    def _times_at(self, angles: np.ndarray) -> np.ndarray:
        if self.is_flow:
            return self.num_timesteps * np.sin(angles) / (np.sin(angles) + np.cos(angles))
        return np.interp(angles, self._angles, np.arange(len(self._angles))).round()


def _kept_variance(s: SchedulerSettings) -> np.ndarray:
    """Return, for each timestep, the share of the variance that is still signal (alpha bar)."""
    if s.schedule == "cosine":
        # Nichol and Dhariwal 2021, equation 17, with their upper limit on beta.
        place = np.linspace(0, 1, s.num_train_timesteps + 1)
        curve = np.cos((place + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.clip(1 - curve[1:] / curve[:-1], 0, 0.999)
    else:
        betas = np.linspace(FIRST_BETA**0.5, LAST_BETA**0.5, s.num_train_timesteps) ** 2
    return np.cumprod(1 - betas)


def predict(network: nn.Module, noisy: Tensor, times: Tensor, condition: ConditionBatch, multiple: int) -> Tensor:
    """Call the U-Net on a latent of any size: pad its axes with zeros at the far end, and crop the prediction.

    `multiple` is the number that the U-Net needs every axis to be a multiple of. If all are, nothing is copied.
    """
    shape = noisy.shape[2:]
    inputs = condition.unet_inputs
    channels = inputs.pop("channels", None)
    noisy = noisy if channels is None else torch.cat([noisy, channels], dim=1)
    missing = [-axis % multiple for axis in shape]
    if any(missing):
        noisy = F.pad(noisy, (0, missing[2], 0, missing[1], 0, missing[0]))
    prediction = network(noisy, times, **inputs)
    return prediction[:, :, : shape[0], : shape[1], : shape[2]] if any(missing) else prediction
