"""The least time of a step follows from bytes, operations and a card; names of cards are understood."""

import re

import pytest

from memory.kernels.gpus import DEFAULT, check_gpu, chosen_gpu, find_gpu
from memory.kernels.timing import WorkPart, dominant_part, least_seconds
from memory.predict.prediction import ENCODED_VOLUME, PREVIEWS, VALIDATED_VOLUME
from memory.predict.text import describe_time, dominant_text, hours_text
from settings import ConfigError
from tests.memory.ladder.test_walk import BLANK

RTX = check_gpu("RTX 4090")


def part(kind="copy", level=None, is_half=True, nbytes=0, flops=0):
    return WorkPart(kind, level, is_half, nbytes, flops, 1)


def test_a_part_takes_the_longer_of_its_bytes_and_its_operations():
    moved = part(nbytes=round(RTX.bandwidth_gbs * 1e9))
    assert least_seconds([moved], RTX) == pytest.approx(1.0)
    computed = part("convolution", nbytes=1000, flops=round(RTX.half_tflops * 1e12))
    assert least_seconds([computed], RTX) == pytest.approx(2.0), "half of the peak"
    assert least_seconds([moved, computed], RTX) == pytest.approx(3.0)


def test_fp32_work_is_slower_and_convolutions_use_tf32():
    flops = 10**12
    half, tf32, full = (
        least_seconds([part(kind, is_half=is_half, flops=flops)], check_gpu("A100 80GB SXM"))
        for kind, is_half in (("attention", True), ("convolution", False), ("attention", False))
    )
    assert half < tf32 < full


def test_what_dominates_is_named_with_what_leaving_it_out_is_worth():
    work = [part("attention", 1, flops=99 * 10**12), part("convolution", 0, flops=10**12)]
    dominant = dominant_part(work, RTX)
    assert dominant is not None
    assert (dominant.place, round(dominant.share, 3)) == ("attention at level 1", 0.99)
    assert dominant.times_cheaper == pytest.approx(100)
    prediction = BLANK.from_json({**BLANK.to_json(), "work": [w.to_json() for w in work]})
    text = dominant_text(prediction, RTX)
    assert "99% of it is attention at level 1" in text
    assert "100.0 times cheaper" in text
    assert dominant_part([], RTX) is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100", "H100 PCIe"),
        ("Tesla V100-SXM2-16GB", "V100 SXM"),
        ("NVIDIA A10", "A10"),
        ("2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 3080 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-PCIE-40GB MIG 1g.5gb", None),
        ("L40", "L40"),
        ("RTX 9999", None),
        ("", None),
    ],
)
def test_names_of_cards_are_understood_as_drivers_and_people_write_them(name, found):
    gpu = find_gpu(name)
    assert (gpu.name if gpu else None) == found


def test_an_unknown_card_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"--gpu: found 'RTX 9999'; allowed: A10, .*RTX 4090"):
        check_gpu("RTX 9999")
    assert chosen_gpu("l40s").name == "L40S"


def test_without_a_gpu_a_common_card_is_taken(monkeypatch):
    monkeypatch.setattr("memory.kernels.gpus._present_name", lambda: "")
    assert chosen_gpu(None).name == DEFAULT
    monkeypatch.setattr("memory.kernels.gpus._present_name", lambda: "NVIDIA L40S")
    assert chosen_gpu(None).name == "L40S"


def test_hours_of_a_run_contain_validation_previews_and_encoding():
    """A second each: ten updates, two validations of three volumes with previews, and five volumes to encode."""
    second = [part(nbytes=round(RTX.bandwidth_gbs * 1e9)).to_json()]
    values = {"work": second, "max_steps": 10, "num_validations": 2, "num_volumes": [2, 3]}
    beside = {VALIDATED_VOLUME: second, PREVIEWS: second, ENCODED_VOLUME: second}
    prediction = BLANK.from_json({**BLANK.to_json(), **values, "beside": beside})
    assert prediction.hours(RTX) == pytest.approx((10 + 2 * 3 + 2 + 5) / 3600, rel=1e-3)
    text = describe_time(prediction, RTX)
    assert "2 validations of 3 held-out volumes" in text
    assert "encoding 5 volumes" in text
    limited = describe_time(prediction, RTX, max_hours=0.5)
    assert re.search(r"at most 1,80\d updates in the 30 min 0 s that the run trains \(", limited)


@pytest.mark.parametrize(
    ("hours", "text"), [(0.001, "under 1 min"), (0.25, "15 min"), (1.0, "1.0 h"), (47.9, "47.9 h"), (72.0, "3.0 days")]
)
def test_durations_are_written_as_people_say_them(hours, text):
    assert hours_text(hours) == text
