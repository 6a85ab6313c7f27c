"""Conditions that a command is given as files: found, checked, and brought to the latent grid."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from data.discovery import expanded, series_in
from data.files import dicom
from data.formats import SUFFIXES, content_digest, read_header, suffix_of
from data.geometry import geometry_of
from data.pairs.geometry import mismatch
from data.pairs.label_maps import label_problem, label_shares, mask_problem, unknown_values
from data.pairs.numbers import NumberCode
from data.pairs.pairs import label_reading
from data.pairs.partners import named_after
from data.pairs.space import Space, mask_of, space_of_volume
from data.reading import measure
from diffusion.conditioning.condition import Condition
from diffusion.conditioning.conditions import coder_of, empty_condition, encoder_of
from diffusion.conditioning.volumes import Encode, joined_volume, normalised, without
from diffusion.normalisation import Normalisation
from models.volume_codec import VolumeCodec
from runtime.files.names import printable
from settings import DataError, Settings, UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GivenFiles:
    """What a command is given: a file or a folder for each kind of condition, or None."""

    labels: str | None = None
    condition: str | None = None
    mask: str | None = None

    @property
    def name(self) -> str | None:
        """Return the name of the condition volumes, or else of the label maps, without its ending; None without any."""
        place = self.condition or self.labels
        return None if place is None else _stem(expanded(place).absolute().name)


@dataclass(frozen=True)
class GivenCondition:
    """One case: its name, its channels on the latent grid (C, D, H, W), and the space that its files lie in.

    `digest` is the hash of its files, which tells it from another case of the same name.
    """

    name: str
    joined: Tensor
    space: Space
    digest: str

    def condition(self, settings: Settings, label: int | None = None) -> Condition:
        """Return the condition of one sample of the case; without a label its class is hidden."""
        nothing = empty_condition(settings, 1)
        classes = nothing.classes
        if classes is not None:
            classes = torch.full_like(classes, settings.ldm.conditioning.hidden_class if label is None else label)
        return replace(nothing, classes=classes, joined=self.joined[None])


def given_conditions(
    settings: Settings,
    given: GivenFiles,
    codec: VolumeCodec,
    normalisation: Normalisation,
    label_values: Sequence[int] = (),
) -> list[GivenCondition]:
    """Return the cases of the files that a command is given, in the order of their names; empty without files.

    Files of different kinds belong together if they have the same name, but for endings as in training; a single file
    belongs to any. Raises `UserError` if the run was not trained on such files, and DataError, naming the file, if one
    does not suit.
    """
    _check_options(settings, given)
    s = settings.ldm.conditioning
    volumes = _files_of(given.condition, "--condition")
    maps, masks = (
        named_after(_files_of(place, option), volumes)
        for place, option in ((given.labels, "--labels"), (given.mask, "--mask"))
    )
    several = [files for files in (maps, volumes) if len(files) > 1]
    names = sorted({name for files in several for name in files} or volumes or maps)
    encode = encoder_of(coder_of(settings, codec)) if volumes else None
    cases = []
    for name in names:
        parts, space = [], None
        label_map, path, mask = (
            _partner(name, files, option)
            for files, option in ((maps, "--labels"), (volumes, "--condition"), (masks, "--mask"))
        )
        if s.label_map.num_classes:
            number = s.label_map.num_classes
            part, space = (torch.zeros(number, *settings.latent_shape[1:]), None)
            if label_map is not None:
                part, space = _label_map(label_map, settings, label_values)
            parts.append(part)
        if s.volume.is_used:
            number = s.volume.num_joined(settings.autoencoder.latent_channels)
            part = torch.zeros(number, *settings.latent_shape[1:])
            if path is not None:
                part, space = _volume(path, mask, settings, encode)
                _check_together(label_map, path, space, settings)
                part = normalised(part, normalisation)
            parts.append(part)
        assert space is not None, "a case has at least one file"
        digests = [content_digest(file) if file is not None else "" for file in (label_map, path, mask)]
        digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()
        cases.append(GivenCondition(name, torch.cat(parts), space, digest))
    return cases


def check_class(label: int | None, class_names: Sequence[str], is_ever_hidden: bool) -> None:
    """Raise `UserError` if cases have no class, and the network was never trained with a hidden one."""
    if label is None and class_names and not is_ever_hidden:
        raise UserError(
            "--class: not given, but the run was trained with the class of every volume (dropout: 0); allowed: "
            f"{', '.join(class_names)}; choose one of them"
        )


def given_numbers(asked: Sequence[str], code: NumberCode | None, is_ever_hidden: bool = True) -> Tensor | None:
    """Return the coded numbers (1, N) of texts such as age=63, others hidden; None if the run has no numbers.

    Raises `UserError` for what is not one of the run's numbers and, unless the network was trained with hidden ones, if
    one is not given.
    """
    if code is None:
        if asked:
            raise UserError(f"--number: {printable(asked[0])}, but the run was trained without numbers; leave it out")
        return None
    known = code.columns
    values: dict[str, str] = {}
    for text in asked:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in known or name in values:
            what = "given twice" if name in values else "not a number of the run"
            raise UserError(
                f"--number: {printable(text)}, {what}; allowed: {', '.join(map(printable, known))}, each once; write "
                f"{printable(known[0])}=VALUE"
            )
        values[name] = value
    missing = [name for name in known if name not in values]
    if missing and not is_ever_hidden:
        raise UserError(
            f"--number: {', '.join(map(printable, missing))} not given, but the run was trained with every number of "
            f"every volume (dropout: 0); add --number {printable(missing[0])}=VALUE"
        )
    try:
        vector = torch.tensor([code.encode(values)])
    except ValueError as error:
        raise UserError(f"--number: {error}; correct it") from None
    for (name, _, _), (lowest, highest) in zip(code.continuous, code.ranges, strict=False):
        if name in values and not lowest <= float(values[name]) <= highest:
            log.warning(
                "--number: %s=%s is outside what the run was trained on, %g to %g; the volumes are extrapolated",
                printable(name),
                printable(values[name]),
                lowest,
                highest,
            )
    return vector


def _check_options(settings: Settings, given: GivenFiles) -> None:
    """Raise `UserError` if an option is given that the run cannot use, or left out that it needs."""
    s = settings.ldm.conditioning
    kinds = (
        ("--labels", given.labels, s.label_map.num_classes > 0, s.dropout, "label maps"),
        ("--condition", given.condition, s.volume.is_used, s.dropout, "condition volumes"),
        ("--mask", given.mask, s.volume.fills, 1.0, "holes to fill"),
    )
    for option, place, is_used, dropout, what in kinds:
        if place is not None and not is_used:
            raise UserError(f"{option}: the run was trained without {what}; leave it out")
        if place is None and is_used and not dropout:
            raise UserError(
                f"{option}: not given, but the run was trained with {what} for every volume (dropout: 0); give a file "
                "or a folder of them"
            )
    if s.volume.fills and (given.condition is None) != (given.mask is None):
        missing = "--mask" if given.mask is None else "--condition"
        raise UserError(
            f"{missing}: not given; the run fills what a mask says is unknown in a volume; give both --condition and "
            "--mask"
        )


def _files_of(place: str | None, option: str) -> dict[str, Path]:
    """Return the volume file that an option names, or those of the folder that it names, by name without its ending.

    A DICOM series is a folder: the one that is named, or a folder in it.
    """
    if place is None:
        return {}
    path = expanded(place)
    found = [path] if path.is_file() else []
    series: dict[str, Path] = {}
    if path.is_dir():
        items = sorted(item for item in path.iterdir() if not item.name.startswith("."))
        found = [item for item in items if suffix_of(item.name) and not item.is_dir() and not dicom.is_dicom(item)]
        series = _series([path, *(item for item in items if item.is_dir())], option)
    if found or series:
        named = {_stem(item.name): item for item in found} | series
        if len(named) == len(found) + len(series):
            return named
        raise UserError(
            f"{option}: {printable(place)} has two files of one name but for the ending; remove one of them"
        )
    what = "holds no volume" if path.is_dir() else "does not exist"
    raise UserError(f"{option}: {printable(place)} {what}; a file ({' '.join(SUFFIXES)}) or a folder of them is needed")


def _stem(name: str) -> str:
    return name[: len(name) - len(suffix_of(name) or "")]


def _series(folders: Sequence[Path], option: str) -> dict[str, Path]:
    """Return the DICOM series in these folders, each as its first file, by the name of its folder.

    Several series of one folder are told apart by the names of their first files.
    """
    found: list[tuple[str, Path]] = []
    for folder in folders:
        if any(dicom.is_dicom(item) for item in folder.iterdir()):
            series, _ = series_in(folder.parent, folder, option)
            found += [(name.replace("/", "_"), path) for name, path in series.items()]
    if len(dict(found)) < len(found):
        names = [name for name, _ in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{option}: two DICOM series are named {printable(twice)}; rename the folder of one of them")
    return dict(found)


def _partner(name: str, files: dict[str, Path], option: str) -> Path | None:
    """Return the file of a case: the one of its name, or the only one."""
    if not files or name in files:
        return files.get(name)
    if len(files) == 1:
        return next(iter(files.values()))
    raise UserError(f"{option}: no file named {printable(name)} as the other files of the case are; add or rename it")


def _check_together(label_map: Path | None, volume: Path, space: Space, settings: Settings) -> None:
    """Raise DataError if a case's label map does not cover the space that its volume is brought to."""
    if label_map is None:
        return
    x, y, z = space.geometry.shape
    header = replace(read_header(volume), shape=(x, y, z), affine=space.geometry.affine)
    problem = mismatch(label_map, read_header(label_map), volume, header, settings.data)
    if problem is not None:
        raise DataError(problem)


def _label_map(path: Path, settings: Settings, values: Sequence[int]) -> tuple[Tensor, Space]:
    number = settings.ldm.conditioning.label_map.num_classes
    _, facts = measure(path, label_reading(settings.data, number))
    problem = label_problem(path, facts) or unknown_values(path, facts, number, values)
    if problem is not None:
        raise DataError(problem)
    shares = label_shares(path, number, settings.data, settings.latent_shape[1:], values)
    return torch.from_numpy(shares), Space(geometry_of(facts.header, settings.data))


def _volume(path: Path, mask: Path | None, settings: Settings, encode: Encode | None) -> tuple[Tensor, Space]:
    s = settings.ldm.conditioning.volume
    if mask is None:
        image, space = space_of_volume(path, settings.data, s)
        return joined_volume(image, None, encode, settings.latent_shape[1:]), space
    _, facts = measure(mask, label_reading(settings.data, 2))
    problem = mask_problem(mask, facts)
    if problem is not None:
        raise DataError(problem)
    unknown = mask_of(mask, path, settings.data)
    image, space = space_of_volume(path, settings.data, s, unknown.in_file)
    image = without(image, unknown.on_grid)
    return joined_volume(image, unknown.on_grid, encode, settings.latent_shape[1:]), space
