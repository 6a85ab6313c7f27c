"""The time of a step follows from bytes, operations and a card; names of cards are understood."""

import re
from pathlib import Path

import pytest

from memory.kernels import gpus
from memory.kernels.gpus import (
    DEFAULT,
    GPUS,
    WorkPart,
    check_gpu,
    chosen_gpu,
    dominant_part,
    find_gpu,
    hours_range_text,
    known_or_stand_in,
    predicted_seconds,
    seconds_of,
    seconds_range_text,
)
from memory.predict.prediction import ENCODED_VOLUME, PREVIEWS, VALIDATED_VOLUME
from memory.predict.step import predict_step
from memory.predict.text import describe_time, dominant_text
from settings import ConfigError, load_settings
from tests.memory.ladder.test_walk import BLANK

ROOT = Path(__file__).resolve().parents[3]
A100, RTX = check_gpu("A100 40GB"), check_gpu("RTX 4090")


def part(kind="copy", level=None, is_half=True, nbytes=0, flops=0):
    return WorkPart(kind, level, is_half, nbytes, flops, 0)


def test_a_part_takes_the_time_of_its_bytes_its_operations_and_its_kernels():
    moved = part(nbytes=round(gpus.MOVED * A100.bandwidth_gbs * 1e9))
    assert predicted_seconds([moved], A100) == pytest.approx(1.0, rel=1e-3)
    computed = part("attention", flops=round(gpus.PRODUCT * A100.half_tflops * 1e12))
    assert predicted_seconds([computed], A100) == pytest.approx(1.0, rel=1e-3)
    both = WorkPart("attention", None, True, moved.nbytes, computed.flops, 1000)
    assert seconds_of(both, A100) == pytest.approx(2 + 1000 * gpus.KERNEL_SECONDS)
    assert predicted_seconds([moved, both], A100) == pytest.approx(3.01, rel=1e-3)
    assert predicted_seconds([WorkPart("other", None, False, 0, 0, 1000)], A100) == 1000 * gpus.HOST_SECONDS


@pytest.mark.parametrize(
    ("gpu", "is_half", "kind", "tflops"),
    [
        ("A100 80GB SXM", True, "convolution", gpus.HALF_CONVOLUTION * 312),
        ("A100 80GB SXM", False, "convolution", gpus.TF32_CONVOLUTION * 156),
        ("A100 80GB SXM", False, gpus.BACKWARD_CONVOLUTION, gpus.TF32_CONVOLUTION * 156),
        ("V100 SXM", False, "convolution", gpus.FLOAT_CONVOLUTION * 15.7),
        ("V100 SXM", False, gpus.BACKWARD_CONVOLUTION, gpus.FLOAT_CONVOLUTION_BACKWARD * 15.7),
        ("Titan Xp", True, "convolution", gpus.FLOAT_CONVOLUTION * 12.1),
        # Cards for games sum at half the rate of their tensor cores, which only products come near.
        ("RTX 2080 Ti", True, "convolution", gpus.HALF_CONVOLUTION * 8 * 13.4),
        ("RTX 4090", True, "attention", 2 * 82.6),
        ("A100 40GB", True, gpus.NARROW_ATTENTION, gpus.NARROW_PRODUCT * 312),
        ("A100 40GB", False, "attention", gpus.TF32_CONVOLUTION * 156),
    ],
)
def test_operations_run_on_tensor_cores_where_the_card_has_them_for_their_dtype(gpu, is_half, kind, tflops):
    assert seconds_of(part(kind, None, is_half, 0, 10**12), check_gpu(gpu)) == pytest.approx(1 / tflops)


def test_copies_into_another_layout_are_slow_and_need_tensor_cores():
    copies = part(gpus.LAYOUT, nbytes=10**9)
    assert seconds_of(copies, RTX) > 2 * seconds_of(part(nbytes=10**9), RTX)
    assert seconds_of(copies, check_gpu("Titan Xp")) == 0


def test_copies_over_pcie_take_the_bandwidth_of_the_bus_beside_the_computation():
    second = round(2 * gpus.BUS_MOVED * RTX.bus_gbs * 1e9)  # read at one end and written at the other
    computed = part(nbytes=round(gpus.MOVED * RTX.bandwidth_gbs * 1e9))
    for copied, seconds, kind, share in ((0.5, 1.0, "copy", 1.0), (4.0, 4.0, gpus.BUS_COPY, 0.75)):
        work = [computed, part(gpus.BUS_COPY, nbytes=round(copied * second))]
        assert predicted_seconds(work, RTX) == pytest.approx(seconds)
        assert dominant_part(work, RTX) == (kind, None, pytest.approx(share))
    buses = {name: check_gpu(name).bus_gbs for name in ("V100 SXM", "RTX 4090", "RTX 4060 Ti", "RTX 5090")}
    assert list(buses.values()) == [15.75, 31.5, 15.75, 63]


@pytest.mark.parametrize(("config", "host_seconds"), [("quickstart", 0.0102), ("default", 0.0213)])
def test_small_steps_of_stage_2_take_what_the_host_needs_to_start_their_kernels(config, host_seconds):
    """Measured with torch's CUDA build and a stand-in for the GPU whose kernels do nothing; medians of six runs."""
    settings = load_settings(f"{ROOT}/configs/{config}.yaml", ["ldm.training.optimizer=adam"], stage="ldm")
    prediction = predict_step(settings, "ldm", whole_run=False)
    assert 1 / 1.5 < prediction.seconds_per_step(check_gpu(DEFAULT)) / host_seconds < 1.5


def test_what_dominates_is_named_with_what_leaving_it_out_is_worth():
    work = [part("attention", 1, flops=99 * 10**12), part("attention", 0, flops=10**12)]
    assert dominant_part(work, RTX) == ("attention", 1, pytest.approx(0.99))
    prediction = BLANK.from_json({**BLANK.to_json(), "work": [w.to_json() for w in work]})
    text = dominant_text(prediction, RTX)
    assert "99% of it is attention at level 1" in text
    assert "100.0 times cheaper" in text
    assert dominant_text(BLANK, RTX) == ""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("Tesla V100-SXM2-16GB", "V100 SXM"),
        ("NVIDIA A10", "A10"),
        ("2080 Ti", "RTX 2080 Ti"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("RTX 4070Ti", "RTX 4070 Ti"),
        ("geforce rtx-4070-ti", "RTX 4070 Ti"),
        ("RTX4070TiSUPER", "RTX 4070 Ti SUPER"),
        ("4080S", "RTX 4080 SUPER"),
        ("RTX 4080 S", "RTX 4080 SUPER"),
        ("RTX 5090 Notebook", None),
        ("NVIDIA A10M", None),
        ("A100 80 GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA RTX A5000 Laptop GPU", None),
        ("NVIDIA RTX 4000 SFF Ada Generation", None),
        ("NVIDIA H200", "H200 NVL"),  # drivers call both cards so; the slower one
        ("NVIDIA A100-PCIE-40GB MIG 1g.5gb", None),
        ("L40", "L40"),
        ("RTX 9999", None),
        ("", None),
    ],
)
def test_names_of_cards_are_understood_as_drivers_and_people_write_them(name, found):
    gpu = find_gpu(name)
    assert (gpu.name if gpu else None) == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RTX 4071", "found 'RTX 4071', which is none of the .* the nearest: RTX 407.*; take the one most like yours"),
        ("h100", "found 'h100', which 3 cards are called; allowed: H100 PCIe, H100 NVL, H100 SXM; name one of them"),
    ],
)
def test_a_name_of_no_card_or_of_several_is_refused_with_those_that_are_meant(name, text):
    with pytest.raises(ConfigError, match=f"--gpu: {text}"):
        check_gpu(name)


def test_the_card_of_the_machine_or_what_stands_in_for_it_is_taken(monkeypatch):
    names = []
    for present in ("", "NVIDIA L40S", "NVIDIA GeForce RTX 9999"):
        monkeypatch.setattr("memory.kernels.gpus._present_name", lambda present=present: present)
        names.append(chosen_gpu(None).name)
    unknown = f"{DEFAULT}, in place of NVIDIA GeForce RTX 9999, which is not in the table"
    assert names == [DEFAULT, "L40S", unknown]
    assert known_or_stand_in("NVIDIA GeForce RTX 9999").bandwidth_gbs == check_gpu(DEFAULT).bandwidth_gbs


def test_the_figures_of_all_cards_are_plausible():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    assert {gpu.memory_gb for gpu in GPUS} >= {6, 8, 10, 12, 16, 24, 32, 48, 80}
    for gpu in GPUS:
        assert find_gpu(gpu.name) == check_gpu(gpu.name) == gpu
        assert gpu.float_tflops <= gpu.tf32_tflops <= gpu.half_tflops <= gpu.tensor_tflops, gpu.name
        assert 5 < gpu.bandwidth_gbs / gpu.float_tflops < 110, gpu.name
        assert gpu.source


def test_hours_of_a_run_contain_validation_previews_and_encoding():
    """A second each: ten updates, two validations of three volumes with previews, and five volumes to encode."""
    second = [part(nbytes=round(gpus.MOVED * RTX.bandwidth_gbs * 1e9)).to_json()]
    values = {"work": second, "max_steps": 10, "num_validations": 2, "num_volumes": [2, 3]}
    beside = {VALIDATED_VOLUME: second, PREVIEWS: second, ENCODED_VOLUME: second}
    prediction = BLANK.from_json({**BLANK.to_json(), **values, "beside": beside})
    assert prediction.hours(RTX) == pytest.approx((10 + 2 * 3 + 2 + 5) / 3600, rel=1e-3)
    text = describe_time(prediction, RTX)
    assert "0.8 to 1.5 s an update" in text
    assert "2 validations of 3 held-out volumes" in text
    assert "encoding 5 volumes" in text
    assert "least" not in text
    limited = describe_time(prediction, RTX, max_hours=0.5)
    assert re.search(r"1,20\d to 2,25\d updates in the 30 min 0 s that the run trains \(", limited)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (hours_range_text(0.01), "under 2 min"),
        (hours_range_text(0.25), "12 to 22 min"),
        (hours_range_text(14.0), "11.2 to 21.0 h"),
        (hours_range_text(72.0), "2.4 to 4.5 days"),
        (seconds_range_text(2.0), "1.6 to 3 s"),
        (seconds_range_text(0.02), "16 to 30 ms"),
        (seconds_range_text(2.0, is_measured=True), "1.8 to 2.2 s"),
    ],
)
def test_times_are_written_as_a_range(text, expected):
    assert text == expected
