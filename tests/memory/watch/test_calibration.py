"""Full steps measured on a machine correct its predictions: of their own config fully, of others only upwards."""

import json
from dataclasses import replace

import pytest
import torch

from memory.kernels.gpus import MOVED, WorkPart, check_gpu, time_range
from memory.predict.prediction import GIB, fingerprint, fullest_step
from memory.watch import calibration
from memory.watch.memory_watch import MemoryWatch
from runtime.processes import Process
from settings import Settings, UserError
from tests.memory.ladder.test_walk import BLANK


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def made(**values):
    standard = {"peak_allocated_bytes": 4 * GIB, "peak_reserved_bytes": 4 * GIB, "config": "this"}
    return replace(BLANK, **{**standard, **values})


def record(prediction, measured_bytes):
    return calibration.record(prediction, "memory", measured_bytes, prediction.peak_allocated_bytes)


def test_a_measured_step_corrects_its_own_config_and_the_margin_shrinks_but_stays():
    prediction = made()
    assert calibration.corrected(prediction) == prediction
    margins = [prediction.margin]
    for _ in range(3):
        assert record(prediction, 5 * GIB) == pytest.approx(1.25)
        again = calibration.corrected(prediction)
        assert again.required_bytes == 5 * GIB + prediction.context_bytes
        margins.append(again.margin)
    assert torch.__version__ in again.correction_source
    assert margins == sorted(margins, reverse=True)
    assert len(set(margins)) == 4
    assert margins[-1] > 0


def test_other_configs_are_raised_within_the_tier_and_never_lowered():
    record(made(), 5 * GIB)
    other = made(config="other")
    assert calibration.corrected(other).correction == pytest.approx(1.25)
    assert calibration.corrected(other).margin == other.margin
    for unlike in (made(config="other", tier="slabs"), made(config="other", stage="ldm")):
        assert calibration.corrected(unlike) == unlike
    calibration.calibration_file().unlink()
    record(made(), 3 * GIB)
    assert calibration.corrected(other) == other


def test_what_a_gpu_measured_says_nothing_about_a_cpu():
    record(made(), 5 * GIB)
    names = {fingerprint(Settings().with_overrides({"device.type": d}), "ldm") for d in ("auto", "cuda", "cpu")}
    assert len(names) == 2  # a config that leaves the device open is the one that trains on a GPU
    on_cpu = made(context_bytes=0)
    assert calibration.corrected(on_cpu) == on_cpu
    record(on_cpu, 6 * GIB)
    assert calibration.corrected(on_cpu).correction == pytest.approx(1.5)
    assert calibration.corrected(made()).correction == pytest.approx(1.25)


def test_steps_measured_here_say_nothing_about_another_card(monkeypatch):
    record(made(), 5 * GIB)
    with monkeypatch.context() as hidden:  # a machine whose GPUs are hidden has no name for them
        hidden.setattr("torch.cuda.is_available", lambda: True)
        hidden.setattr("torch.cuda.device_count", lambda: 0)
        assert calibration.corrected(made()).correction == pytest.approx(1.25)
    assert calibration.corrected(made(), "L40S") == made()


def checked_file(path, seconds=1.5, **machine):
    """Write what scripts/check_gpu.sh leaves: tables, then everything as JSON."""
    step = {"preset": "x", "stage": BLANK.stage, "tier": BLANK.tier, "config": "this", "seconds": seconds}
    step |= {"predicted_seconds": 1.0, "peak_allocated_bytes": 5, "predicted_peak_allocated_bytes": 4}
    values = {"machine": {"gpu": "NVIDIA GeForce RTX 4090", "torch": "2.13", "cudnn": 92000, **machine}}
    text = json.dumps({"format": 1, "basics": {}, **values, "steps": [step]})
    path.write_text(f"# Checked\n\n```json\n{text}\n```\n")
    return path


def test_the_file_of_a_checked_gpu_decides_on_any_machine_and_the_range_narrows(tmp_path):
    assert len(calibration.learn(checked_file(tmp_path / "check_gpu.md")).steps) == 1
    corrected = calibration.corrected(made(), "RTX 4090")
    assert (corrected.correction, corrected.time_correction) == (1.25, 1.5)
    assert corrected.margin < made().margin
    narrow, wide = (time_range(1.0, prediction.is_time_measured) for prediction in (corrected, made()))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    for name in ("RTX 4090 Laptop", "L40S", None):
        assert calibration.corrected(made(), name) == made()
    calibration.learn(checked_file(tmp_path / "newer.md", 1.25, torch="2.14"))
    assert calibration.corrected(made(), "RTX 4090").time_correction == 1.25


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "```json\n{}\n```"])
def test_another_file_than_that_of_a_checked_gpu_is_refused(tmp_path, text):
    (tmp_path / "other.md").write_text(text)
    with pytest.raises(UserError, match=r"other.md: .*; files that scripts/check_gpu.sh wrote are allowed; run it"):
        calibration.learn(tmp_path / "other.md")
    with pytest.raises(UserError, match="No such file"):
        calibration.learn(tmp_path / "missing.md")


def test_implausible_steps_of_a_checked_gpu_are_refused_and_take_nothing_away(tmp_path):
    path = checked_file(tmp_path / "check_gpu.md")
    calibration.learn(path)
    before = calibration.calibration_file().read_text()
    content = json.loads(path.read_text().split("```json\n")[1].split("\n```")[0])
    for step in content["steps"]:
        step |= {"seconds": -1.0, "peak_allocated_bytes": 10**30}
    (tmp_path / "damaged.md").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"damaged.md: no step that is plausible"):
        calibration.learn(tmp_path / "damaged.md")
    assert calibration.calibration_file().read_text() == before


def test_no_measurement_takes_a_prediction_below_its_tensors_and_the_phase_that_needs_the_most_is_named():
    lower = made(peak_reserved_bytes=5 * GIB, config="lower")
    record(lower, 3 * GIB)
    assert calibration.corrected(lower).required_bytes == 4 * GIB + lower.context_bytes
    prediction = made(run_peaks={"validation": {"allocated_bytes": 4 * GIB, "reserved_bytes": 5 * GIB}})
    assert prediction.needing_phase == "validation"
    record(prediction, 6 * GIB)
    again = calibration.corrected(prediction)
    assert (again.needing_phase, again.required_bytes) == ("training step", 6 * GIB + prediction.context_bytes)


def test_measured_times_replace_the_predicted_ones():
    gpu = check_gpu("RTX 4090")
    work = [WorkPart("copy", None, True, nbytes=round(MOVED * gpu.bandwidth_gbs * 1e9), flops=0, kernels=0).to_json()]
    prediction = made(work=work, max_steps=3600)
    assert prediction.hours(gpu) == pytest.approx(1.0)
    calibration.record(prediction, "time", 1.5, 1.0)
    assert calibration.corrected(prediction).hours(gpu) == pytest.approx(1.5)
    assert calibration.corrected(prediction).correction == 1.0
    assert calibration.record(prediction, "time", 1e4, 1.0) is None


def test_what_is_implausible_cannot_be_saved_or_is_damaged_corrects_nothing(tmp_path, monkeypatch, caplog):
    prediction = made()
    # Another program's memory on the same GPU is no measurement of ours.
    assert record(prediction, 40 * GIB) is None
    record(prediction, 5 * GIB)
    for damage in ("{damaged", "[]", '{"cpu": 3}', '{"cpu": {"this": {"memory": "much"}}}'):
        calibration.calibration_file().write_text(damage)
        assert calibration.corrected(prediction) == prediction
    # A folder that cannot be written costs the correction, not the run.
    monkeypatch.setenv("XDG_CACHE_HOME", str(calibration.calibration_file()))
    caplog.clear()
    assert record(prediction, 5 * GIB) is None
    [warning] = caplog.messages
    assert "cannot be saved for later predictions" in warning


def test_only_the_second_full_step_is_recorded(tiny_values, tmp_path, monkeypatch):
    """The first has no optimizer states before it ends; steps before the adversarial term lack that term."""
    tiny_values["autoencoder"]["training"]["adversarial_start_step"] = 3
    settings = Settings.model_validate(tiny_values)
    assert fullest_step(settings, "autoencoder") == 3
    recorded: list[int] = []
    step = 0
    monkeypatch.setattr("memory.watch.memory_watch.record", lambda *_: recorded.append(step))
    with MemoryWatch(settings, "autoencoder", Process(torch.device("cpu"))) as watch:
        watch.prediction = made()
        monkeypatch.setattr(watch, "process", Process(torch.device("cuda")))
        monkeypatch.setattr(watch.readings, "step_peak_bytes", lambda: 0)
        for step in range(8):
            with watch.guard(tmp_path, step):
                pass
    assert recorded == [4]
