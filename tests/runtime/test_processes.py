"""Two processes compute what one computes with twice the accumulation, and agree on what happens."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import yaml

from runtime import processes
from settings import ConfigError, Settings
from tests.faults.runs import free_port
from tests.support.tiny_config import TINY

SCRIPT = "tests/runtime/two_ranks.py"


@pytest.fixture(scope="module")
def found(warm, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """The results of one process, and of each of two."""
    values = copy.deepcopy(TINY)
    values["ldm"]["training"]["batch_size"] = 1
    port = str(free_port())
    result = {}
    for name, world_size, accumulation in (("one", 1, 4), ("two", 2, 2)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
        sections = ("autoencoder", "ldm")
        overrides = [f"{section}.training.gradient_accumulation_steps={accumulation}" for section in sections]
        together = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        together |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        commands = [
            warm(
                folder,
                SCRIPT,
                "tiny.yaml",
                *overrides,
                output=folder / f"output_{rank}.log",
                **together | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world_size)
        ]
        for command in commands:
            assert command.wait() == 0, command.output
        result[name] = [
            torch.load(folder / f"found_{rank}.pt", weights_only=True) | {"output": command.output}
            for rank, command in enumerate(commands)
        ]
    return result


@pytest.mark.parametrize("stage", ["autoencoder", "ldm", "conditional"])
def test_gradients_of_two_processes_equal_those_of_one_with_twice_the_accumulation(found, stage):
    (one,), (first, second) = found["one"], found["two"]
    assert one[stage].keys() == first[stage].keys()
    for network in {name.split(".")[0] for name in one[stage]}:
        names = [name for name in one[stage] if name.startswith(f"{network}.")]
        vectors = [torch.cat([each[stage][name].flatten() for name in names]) for each in (one, first, second)]
        assert vectors[0].norm() > 0, network
        for vector in vectors[1:]:
            difference = (vector - vectors[0]).norm() / vectors[0].norm()
            assert difference <= 1e-6, f"{network}: {difference:.2e}"
    torch.testing.assert_close(first[stage], second[stage], rtol=0, atol=0)


def test_conditions_and_codebook_of_two_processes_are_those_of_one_with_twice_the_accumulation(found):
    (one,), (first, second) = found["one"], found["two"]
    assert (len(one["condition scale"]), len(one["codebook"])) == (2, 3)
    for name in ("condition scale", "codebook"):
        torch.testing.assert_close(first[name], one[name], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)


def test_gradients_are_exchanged_once_per_update_with_the_strides_that_this_needs(found):
    for process in found["two"]:
        assert "Grad strides do not match bucket view strides" not in process["output"]
        for travelled in process["reductions"]:
            assert travelled, "gradients never travelled"
            assert len(travelled) == len(set(travelled)), "a bucket of gradients travelled twice"


def test_validation_is_the_same_however_volumes_are_shared_out(found):
    (one,), two = found["one"], found["two"]
    for name in ("validation of 3", "validation of 1"):
        assert one[name]["val_psnr"] > 0
        for process in two:
            torch.testing.assert_close(process[name], one[name], rtol=1e-5, atol=0)
    assert one["validation of 0"] == two[1]["validation of 0"] == {}


def test_latents_are_encoded_in_shares_and_scaled_as_one(found):
    (one,), two = found["one"], found["two"]
    for process in two:
        assert process["latent scale"] == pytest.approx(one["latent scale"], rel=1e-6)
        for name in ("held-out loss", "conditional skill"):
            assert "val_skill" in one[name]
            torch.testing.assert_close(process[name], one[name], rtol=1e-5, atol=0)


def test_processes_agree_on_flags_values_and_errors_and_name_the_volumes_that_are_not_finite(found):
    for rank, process in enumerate(found["two"]):
        assert process["not finite"].startswith("step 4: reconstruction is not finite for seen by 1;")
        assert process["any"] == (True, False)
        assert process["from first"] == "said by 0"
        assert process["together"] == ("volume.nii: gone", 2, rank == 0)


@pytest.mark.parametrize("has_more", [0, 1])
def test_ranks_of_other_versions_are_refused_by_the_key_that_one_lacks(monkeypatch, has_more):
    def gather(gathered, facts, group):
        gathered[:] = [facts, facts]
        gathered[has_more] = facts | {"new.key": "7"}

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(ConfigError, match=r"new\.key: (unset|7) on rank 0 and (unset|7) on rank 1"):
        processes._check_equal(processes.Process(torch.device("cpu"), world_size=2), Settings.model_validate(TINY))


def test_ranks_of_which_one_has_no_gpu_are_refused_before_they_wait_for_each_other():
    store = torch.distributed.HashStore()

    def refused(rank: int, kind: str) -> tuple[str, bool | None]:
        with pytest.raises(ConfigError) as raised:
            processes._check_same_kind(store, torch.device(kind), rank, 2)
        return str(raised.value), raised.value.is_reported_by_another_rank

    with ThreadPoolExecutor() as threads:
        (first, *reported), (second, *again) = threads.map(refused, (0, 1), ("cuda", "cpu"))
    assert first == second
    assert "device.type: cuda on rank 0 and cpu on rank 1; check nvidia-smi" in first
    assert reported + again == [False, True]


def test_ranks_that_differ_ask_nothing_of_a_store_that_rank_zero_may_have_ended():
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    store.set("device of 0", "cuda")
    with pytest.raises(ConfigError, match="cuda on rank 0 and cpu on rank 1"):
        processes._check_same_kind(store, torch.device("cpu"), 1, 2)
