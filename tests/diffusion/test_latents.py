"""Latents of a run: encoded once, never stale, whole or absent on disk, scaled over the training set, in order."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data import VolumeFile, prepare_volumes
from data.batches import BatchPlan, VolumeOrder
from data.loading import load_file
from diffusion.conditioning.class_label import check_classes, class_number
from diffusion.latent_files import TensorCache, latent_key, latent_name
from diffusion.latents import LATENTS, pose_of, prepare_latents
from models import build_autoencoder
from models.frozen_autoencoder import freeze
from models.volume_codec import VolumeCodec
from runtime.precision import Precision
from runtime.processes import Process
from settings import ConfigError, DataError, Settings, UserError
from tests.data.small_volumes import build_settings
from tests.diffusion.made_latents import latents_of

CPU = Process(torch.device("cpu"))
NUM_COPIES = 3  # instead of eight


class Counted(VolumeCodec):
    """Counts what is encoded, and stops like a killed process after `limit`."""

    def __init__(self, settings: Settings, limit: int = 1000) -> None:
        torch.manual_seed(0)
        autoencoder = freeze(build_autoencoder(settings.autoencoder))
        super().__init__(autoencoder, settings.autoencoder, Precision(settings.device, CPU.device))
        self.count, self.limit = 0, limit

    def encode(self, image):
        if self.count == self.limit:
            raise KeyboardInterrupt
        self.count += 1
        return super().encode(image)


def prepare(values, codec: Counted | None = None, process: Process = CPU, **changes):
    values = copy.deepcopy(values)
    for dotted, value in changes.items():
        section, name = dotted.split("__")
        (values["ldm"]["latents"] if section == "latents" else values[section])[name] = value
    settings = Settings.model_validate(values)
    codec = codec or Counted(settings)
    volumes = prepare_volumes(settings.data, settings.seed, 1)
    return prepare_latents(codec, volumes, settings, process), codec


@pytest.fixture
def values(tiny_values):
    tiny_values["ldm"]["latents"] = {"cache": "disk"}
    return tiny_values


def test_every_volume_is_encoded_once_and_found_again(values):
    first, codec = prepare(values)
    assert codec.count == 6
    second, codec = prepare(values)
    assert codec.count == 0
    assert torch.equal(second.normalisation.scale, first.normalisation.scale)
    assert second.spacing_mm == first.spacing_mm
    # Other weights or another reading of the data are other latents.
    codec = Counted(Settings.model_validate(values))
    with torch.no_grad():
        next(codec.autoencoder.parameters()).view(-1)[0] += 1e-6
    assert prepare(values, codec)[1].count == 6
    assert prepare(values, data__intensity={"mode": "window", "lower": 0, "upper": 900})[1].count == 6
    assert len(list(LATENTS.iterdir())) == 3


def test_a_killed_encoding_continues_where_it_stopped(values):
    with pytest.raises(KeyboardInterrupt):
        prepare(values, Counted(Settings.model_validate(values), limit=4))
    latents, codec = prepare(values)
    assert codec.count == 2
    expected = prepare(values, latents__cache="memory")[0].normalisation
    assert torch.equal(latents.normalisation.scale, expected.scale)


def test_disk_memory_and_none_give_the_same_latents_and_scale(values):
    disk, _ = prepare(values)
    memory, _ = prepare(values, latents__cache="memory")
    none, codec = prepare(values, latents__cache="none")
    for name, part in disk.normalisation.content().items():
        assert torch.equal(memory.normalisation.content()[name], part)
        assert torch.equal(none.normalisation.content()[name], part)
    assert disk.read is not None
    assert memory.read is not None
    assert none.read is None
    for index in range(6):
        assert torch.equal(disk.read(index, 0), memory.read(index, 0))
    pairs = zip(disk.validation_batches(codec.encode, CPU), none.validation_batches(codec.encode, CPU), strict=True)
    for cached, encoded in pairs:
        assert torch.equal(cached.mean, encoded.mean)
        assert cached.positions == encoded.positions


@pytest.mark.parametrize(
    ("device", "pin_memory", "is_pinned"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_training_latents_are_pinned_for_a_gpu_when_the_settings_say_so(
    values, device, pin_memory, is_pinned, monkeypatch
):
    pinned = []

    def pin(tensor):
        pinned.append(tensor.shape)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    values["data"]["pin_memory"] = pin_memory
    latents, _ = prepare(values, process=Process(torch.device(device)))
    (batch,) = next(latents.training_batches(BatchPlan(seed=1, batch_size=2, accumulation=1), 0, 1))
    condition = [part.shape for part in batch.condition.parts.values()]
    assert pinned == ([batch.mean.shape, *condition] if is_pinned else [])


def test_samples_get_the_median_intensities_of_the_training_set(values):
    latents, _ = prepare(values)
    loaded = [load_file(file, latents.settings) for file in latents.volumes.train]
    uppers = [volume.upper for volume in loaded]
    assert len(set(uppers)) > 1
    assert latents.upper == pytest.approx(tuple(np.median(uppers, axis=0)), rel=1e-6)
    assert latents.lower == pytest.approx(tuple(np.median([volume.lower for volume in loaded], axis=0)), rel=1e-6)


def test_out_of_memory_with_a_whole_volume_continues_in_slabs(values, caplog):
    codec = Counted(Settings.model_validate(values))
    decode = codec.autoencoder.decode

    def limited(latent):
        if codec.slab_rows == 0 or codec.slab_rows > 16:
            raise torch.OutOfMemoryError("as a full GPU says")
        return decode(latent)

    codec.autoencoder.decode = limited  # type: ignore[method-assign]
    latent = torch.rand(3, 24, 8, 8)
    volume = codec.decode(latent)
    torch.testing.assert_close(volume, decode(latent[None])[0], rtol=1e-4, atol=1e-5)
    assert codec.slab_rows == 12
    assert "slabs of 12 rows" in caplog.text


@pytest.mark.parametrize("cache", ["disk", "memory"])
def test_augmented_copies_are_encoded_once_and_drawn_by_position(values, cache, monkeypatch):
    monkeypatch.setattr("diffusion.latents.NUM_COPIES", NUM_COPIES)
    changes = {"data__use_augmentation": True, "latents__cache": cache}
    latents, codec = prepare(values, **changes)
    encoded = codec.count
    plain, _ = prepare(values, latents__cache=cache)
    assert torch.equal(latents.normalisation.scale, plain.normalisation.scale)
    number = len(latents.volumes.train)
    assert latents.read is not None
    assert plain.read is not None
    assert torch.equal(latents.read(number, 0), plain.read(number, 0)), "a held-out volume is as it is"
    with pytest.raises(ConfigError, match=r"cache: none with data\.use_augmentation"):
        prepare(values, data__use_augmentation=True, latents__cache="none")
    assert encoded == number * (1 + NUM_COPIES) + len(latents.volumes.val)
    assert prepare(values, **changes)[1].count == (0 if cache == "disk" else encoded)

    plan = BatchPlan(3, 4, 2)
    steps = list(latents.training_batches(plan, 0, 12))
    again = list(latents.training_batches(plan, 9, 12))
    for before, after in zip(steps[9:], again, strict=True):
        assert all(torch.equal(a.mean, b.mean) for a, b in zip(before, after, strict=True))
    order = VolumeOrder(plan.seed, number)
    known = [[latents.read(index, copy) for copy in range(NUM_COPIES + 1)] for index in range(number)]
    seen = {
        (order(place), next(copy for copy, latent in enumerate(known[order(place)]) if torch.equal(latent, mean)))
        for step in steps
        for batch in step
        for place, mean in zip(batch.positions, batch.mean, strict=True)
    }
    # 96 samples of a few volumes meet nearly every copy.
    assert len(seen) > 0.8 * number * (NUM_COPIES + 1)
    first = known[0]
    distances = [float((latent - first[0]).norm() / first[0].norm()) for latent in first[1:]]
    assert min(distances) > 1e-3, "a copy is the volume itself"


def test_copies_keep_their_size_where_numbers_are_conditions(values):
    """A number may mean a size."""
    plain = Settings.model_validate(values)
    values["ldm"]["conditioning"] = {"tabular": {"table": "t", "continuous": ["volume"]}}
    numbers = Settings.model_validate(values)
    scales = [np.linalg.det(pose_of(s, "5eed" * 16, (1.0, 2.0, 0.5), 1).matrix) for s in (plain, numbers)]
    assert abs(scales[0] - 1) > 0.01
    np.testing.assert_allclose(scales[1], 1)
    # Copies of both kinds may lie in one folder; the latents of the volumes themselves are the same.
    file = prepare_volumes(plain.data, plain.seed, 1).train[0]
    flags = [s.ldm.conditioning.copies_scale for s in (plain, numbers)]
    assert len({latent_name(file, 0, scales) for scales in flags}) == 1
    assert len({latent_name(file, 1, scales) for scales in flags}) == 2


def test_classes_that_do_not_fit_the_data_are_named_and_asked_for_by_name_or_number(values):
    values["ldm"]["conditioning"] = {"type": "class", "num_classes": 2}
    settings = Settings.model_validate(values)
    volumes = prepare_volumes(settings.data, settings.seed, 1)
    with pytest.raises(ConfigError, match=r"2, but the data has 3 \(healthy, lesion, ventricles\); set 3"):
        check_classes(settings.ldm.conditioning, volumes)
    bare = replace(volumes, train=tuple(replace(file, label=None) for file in volumes.train))
    with pytest.raises(DataError, match="no class; 4 of 6 volumes have none"):
        check_classes(settings.ldm.conditioning, bare)
    assert class_number("b", ["a", "b"]) == class_number("1", ["a", "b"]) == 1
    with pytest.raises(UserError, match="'2' is not a class of the run; allowed: a, b"):
        class_number("2", ["a", "b"])
    with pytest.raises(UserError, match="trained without classes"):
        class_number("c", [])


SHAPE = (3, 2, 2, 2)
MEAN = torch.arange(24.0).view(SHAPE)
FACTS = [1.0, 2.0, 100.0]


def cache_in(folder: Path, shape: tuple[int, ...] = SHAPE) -> TensorCache:
    return TensorCache(folder, shape, "ab".__getitem__)


@pytest.fixture
def cache(tmp_path) -> TensorCache:
    """Two latents on disk."""
    found = cache_in(tmp_path / "latents")
    for number in range(2):
        found.write("latent of v0.nii.gz", MEAN + number, number, facts=FACTS)
    return found


def test_a_latent_comes_back_with_its_facts_in_its_shape(cache, tmp_path):
    found = cache.find(1)
    assert found is not None
    assert found[1] == FACTS
    assert torch.equal(found[0], MEAN + 1)
    assert torch.equal(cache.read("", 1), MEAN + 1)
    cache.arrays.path_of("b").unlink()
    assert cache.find(1) is None
    other = cache_in(tmp_path / "latents", (3, 2, 2, 1))
    assert other.find(0) is None
    with pytest.raises(DataError, match="cannot be used, it holds something else"):
        other.read("latent", 0)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"v0\.nii\.gz could not be written"):
        cache_in(tmp_path / "file").write("latent of v0.nii.gz", MEAN, 0)


def test_a_latent_has_the_name_of_the_content_of_its_volume(folder, tmp_path):
    first, second = (VolumeFile(path, path.name) for path in sorted(folder.iterdir())[:2])
    name = latent_name(first, 0, True)
    assert len({name, latent_name(second, 0, True), latent_name(first, 1, True)}) == 3
    os.utime(first.path, ns=(1, 1))
    moved = VolumeFile(first.path.rename(tmp_path / "moved.nii.gz"), "moved.nii.gz")
    assert latent_name(moved, 0, True) == name
    content = bytearray(moved.path.read_bytes())
    content[-1] ^= 1
    moved.path.write_bytes(content)
    assert latent_name(moved, 0, True) != name


def change_a_value(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def swap(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [change_a_value, swap])
def test_a_latent_that_is_not_the_one_written_is_never_read_and_is_made_again(cache, caplog, damage):
    damage(cache.arrays.path_of("a"), cache.arrays.path_of("b"))
    text = r"latents/a\.volume: the cached latent of v0\.nii\.gz cannot be used, it.*; run the same"
    with pytest.raises(DataError, match=text):
        cache.read("latent of v0.nii.gz", 0)
    assert cache.find(0) is None
    assert "; it is made again" in caplog.text
    assert cache.find(1) is not None


def test_the_key_follows_weights_precision_and_reading_and_nothing_else():
    key = latent_key(build_settings(), "weights", "float32")
    assert key == latent_key(build_settings(prepared="memory", num_workers=3, val_fraction=0.5), "weights", "float32")
    others = [
        latent_key(build_settings(), "other weights", "float32"),
        latent_key(build_settings(), "weights", "bfloat16"),
        latent_key(build_settings(voxel_size=[12, 10, 16]), "weights", "float32"),
        latent_key(build_settings(intensity={"mode": "window", "lower": 0, "upper": 300}), "weights", "float32"),
        latent_key(build_settings(spacing=[1.0, 1.0, 1.0]), "weights", "float32"),
    ]
    assert len({key, *others}) == len(others) + 1


def read(index: int, copy: int) -> torch.Tensor:
    return torch.full((1, 2, 2, 2), float(index))


def test_step_n_sees_the_same_latents_whatever_the_batching_ranks_and_start():
    def indices(batch_size: int, accumulation: int, world_size: int, first: int = 0) -> list[list[float]]:
        plans = [BatchPlan(3, batch_size, accumulation, rank, world_size) for rank in range(world_size)]
        steps = [list(latents_of(read, 8).training_batches(plan, first, 6)) for plan in plans]
        together = zip(*steps, strict=True)
        return [sorted(float(m.flatten()[0]) for rank in step for b in rank for m in b.mean) for step in together]

    whole = indices(4, 1, 1)
    assert whole == indices(1, 4, 1) == indices(1, 2, 2) == indices(2, 1, 2)
    assert indices(4, 1, 1, first=3) == whole[3:]
    assert sorted(number for step in whole[:2] for number in step) == [float(n) for n in range(8)]


def test_an_error_in_the_reading_thread_reaches_the_training_loop():
    def fail(index: int, copy: int) -> torch.Tensor:
        raise DataError("v3.nii.gz: gone")

    with pytest.raises(DataError, match="gone"):
        next(iter(latents_of(fail, 8).training_batches(BatchPlan(3, 4, 1), 0, 3)))
