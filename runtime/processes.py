"""The processes of a run, their devices, and how they coordinate; a single process is the simple case."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from runtime.cli import OUT_OF_MEMORY
from runtime.precision import ONEDNN_LIMIT, Precision, computes_bfloat16, limit_cublas, onednn_limit
from settings import ConfigError, DeviceSettings, Problem, Settings, TrainingError, UserError, known_keys
from settings.section import look_up

log = logging.getLogger(__name__)

_JOIN_TIMEOUT = timedelta(minutes=10)
# Inside a step the ranks wait for each other only, so this is how long a cut network goes unnoticed. A process that
# ends is noticed at once.
STEP_TIMEOUT = timedelta(minutes=30)
# One process may check or encode volumes, or draw a preview, for hours while the others wait.
_WAIT_TIMEOUT = timedelta(hours=6)
_STORE_SECONDS = 10

_Answer = TypeVar("_Answer")


def _with_strides(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a gradient with these strides if they mean the same layout, without a copy."""
    sizes = zip(gradient.shape, gradient.stride(), strides, strict=True)
    is_same = all(size == 1 or own == wanted for size, own, wanted in sizes)
    return gradient.as_strided(gradient.shape, strides) if is_same else gradient


@dataclass(frozen=True)
class Process:
    """This process: its rank among the processes that train together, and its device."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    # Gloo groups, so that decisions on the host do not wait for the GPU: for every step, and for what takes hours.
    control: Any = field(default=None, repr=False)
    patient: Any = field(default=None, repr=False)
    # Whether the GPUs of all ranks compute bfloat16 fast; None: this process is alone.
    has_bfloat16: bool | None = None

    @property
    def is_rank_zero(self) -> bool:
        """Return whether this process writes files and logs."""
        return self.rank == 0

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the network wrapped so that backward averages its gradients over all processes."""
        if self.world_size == 1:
            return network
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        # The stride of a dimension of one has no meaning, but torch copies gradients whose strides are not those of the
        # parameter in every respect, with a warning. Convolutions of one channel make such gradients.
        for parameter in network.parameters():
            if parameter.requires_grad and 1 in parameter.shape:
                parameter.register_hook(partial(_with_strides, strides=parameter.stride()))
        return DistributedDataParallel(
            network, device_ids=device_ids, forward_sync_buffers=False, gradient_as_bucket_view=True
        )

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process; no process may keep the others waiting for long."""
        if self.world_size == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control)
        return bool(value)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a host tensor over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self.patient)
        return values

    def sum_on_device(self, values: Tensor) -> Tensor:
        """Return the sum over all processes of a tensor on this process's device, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait for all processes, even for what one does alone, for which the gradients' group would not wait."""
        if self.world_size > 1:
            dist.barrier(group=self.patient)

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value in every process."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.patient)
        return box[0]

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """If the block raises a UserError in any process, raise it in all; no process may wait for another inside."""
        raised: UserError | None = None
        try:
            yield
        except UserError as error:
            raised = error
        self.raise_first(raised)

    def raise_first(self, error: UserError | None, urgency: tuple[int, ...] = ()) -> None:
        """Raise the error with the smallest (urgency, rank), if any, in every process; all processes must call this."""
        if self.world_size == 1:
            if error is not None:
                raise error
            return
        mine = None if error is None else (urgency, self.rank, str(error), error.exit_code)
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, mine, group=self.patient)
        if not any(gathered):
            return
        _, rank, text, exit_code = min(entry for entry in gathered if entry is not None)
        if rank != self.rank or error is None:
            error = TrainingError(text)
            error.exit_code = exit_code
        error.is_reported_by_another_rank = rank != self.rank
        raise error


def synchronised(network: nn.Module, is_last: bool) -> Any:
    """Return the context for a forward and backward pass; gradients are averaged only on the last accumulation pass."""
    if isinstance(network, DistributedDataParallel) and not is_last:
        return network.no_sync()
    return nullcontext()


def choose_device(settings: DeviceSettings, local_rank: int = 0) -> torch.device:
    """Return the device to train on; raise `ConfigError` if the settings ask for a GPU that does not exist.

    Also limits what the libraries of the device may do, which they read when they start.
    """
    if settings.type == "cpu" or (settings.type == "auto" and not torch.cuda.is_available()):
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles")
        if settings.type == "auto" and torch.version.cuda is not None and not is_hidden:
            log.warning(
                "training runs on the CPU: this torch is built for CUDA %s and finds no GPU that it can use (%s); "
                "check nvidia-smi, or install torch and torchvision built for an older CUDA (pytorch.org has the "
                "command); device.type=cpu silences this",
                torch.version.cuda,
                _reason_against_cuda(),
            )
        os.environ[ONEDNN_LIMIT] = onednn_limit(settings)
        if settings.is_half(on_cpu=True):
            log.warning("16 bits are many times slower than float32 on a CPU; leave device.amp_dtype at auto")
        elif settings.mixed_precision:
            log.info("on a CPU training runs in float32, which is faster there than mixed precision")
        return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        found = f"cuda for local rank {local_rank}, and torch sees {torch.cuda.device_count()} GPUs"
        remedy = "set device.type=cpu, check the driver, or start fewer processes per machine"
        raise ConfigError([Problem("device.type", found, "", remedy)])
    device = torch.device("cuda", local_rank)
    if problem := unsupported(torch.cuda.get_device_capability(local_rank), torch.cuda.get_arch_list()):
        found = f"{torch.cuda.get_device_name(local_rank)}, {problem}"
        advice = "install torch and torchvision built for it (pytorch.org has the command), or set device.type=cpu"
        raise ConfigError([Problem("device.type", found, "", advice)])
    if settings.mixed_precision and settings.amp_dtype == "bfloat16" and not computes_bfloat16(device):
        found = f"bfloat16 on {torch.cuda.get_device_name(local_rank)}, which emulates it and has no attention for it"
        raise ConfigError([Problem("device.amp_dtype", found, "", "set auto, which chooses float16 there")])
    limit_cublas()
    return device


def unsupported(capability: tuple[int, int], architectures: Sequence[str]) -> str:
    """Return why a build of torch has no kernels for a GPU of this compute capability, or "" if it has.

    Machine code (sm_86) serves later minor versions of its major one; code for any GPU (compute_90) all later ones.
    """
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = digits.rstrip("af")
        own = (int(number[:-1]), int(number[-1]))
        is_exact = number != digits
        if own == capability or (not is_exact and own < capability and (kind == "compute" or own[0] == capability[0])):
            return ""
    built = ", ".join(name for name in architectures if name.startswith("sm_"))
    return f"compute capability {capability[0]}.{capability[1]}, for which this torch has no kernels (it has {built})"


def _reason_against_cuda() -> str:
    """Return in torch's words why it cannot use a GPU."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].rstrip(".")
    return "no GPU"


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the machine type of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


@contextmanager
def processes(settings: Settings) -> Iterator[Process]:
    """Join the processes that torchrun or srun started, or run alone; leave cleanly at the end.

    Ranks that would train differently are refused, on all of them.

    Sets the CUDA allocator's options first, because CUDA reads them when it starts. When a process ends early, the
    others raise `TrainingError` with the exit code of the process that failed. That code is unknown if the store is
    gone: torchrun's store outlives all processes, but without torchrun the store dies with the first process.
    """
    if settings.device.allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings.device.allocator
    rank, world_size, local_rank = (_number(*entry) for entry in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = choose_device(settings.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        _log_device(settings.device, alone := Process(device))
        yield alone
        return
    store, control, patient = _join(device, rank, world_size)
    is_clean = False
    try:
        process = Process(device, rank, world_size, control, patient)
        process = replace(process, has_bfloat16=not process.any(not computes_bfloat16(device)))
        _check_equal(process, settings)
        _log_device(settings.device, process)
        yield process
        is_clean = True
    except UserError as error:
        if error.is_reported_by_another_rank is None:
            error.is_reported_by_another_rank = not _is_first_report(store, str(error))
        _answer(partial(store.set, "exit code", str(error.exit_code)), None)
        raise
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            _answer(partial(store.set, "exit code", str(OUT_OF_MEMORY)), None)
        if isinstance(error, MemoryError) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        lost = TrainingError(
            "another process of this run ended, or the network to it was cut, so this one stops too; if that process "
            "logged no error it was killed, most likely because memory ran out; run the same command again to resume "
            "from the last checkpoint, if any"
        )
        # The process that failed first has usually reported why, which is more useful than this message.
        published = _answer(lambda: store.get("exit code") if store.check(["exit code"]) else None, None)
        lost.is_reported_by_another_rank = published is not None or not _is_first_report(store, str(lost))
        lost.exit_code = lost.exit_code if published is None else int(published)
        raise lost from error
    finally:
        # NCCL would wait here for the process that ended.
        if is_clean or device.type == "cpu":
            dist.destroy_process_group()


def _log_device(settings: DeviceSettings, process: Process) -> None:
    precision = Precision(settings, process.device, process.has_bfloat16).name
    log.info("device: %s, %s, memory format %s", device_name(process.device), precision, settings.memory_format)


def _check_equal(process: Process, settings: Settings) -> None:
    """Raise `ConfigError` on every rank if ranks differ in what must be equal: they would train different models."""
    facts = {name: str(look_up(settings, name)) for name, _ in known_keys()}
    facts |= {
        "precision": Precision(settings.device, process.device, process.has_bfloat16).name,
        # On a CPU another number of threads sums in another order.
        "number of threads": str(torch.get_num_threads()) if process.device.type == "cpu" else "any",
        "torch": torch.__version__,
        "monai": importlib.metadata.version("monai"),
    }
    gathered: list[dict[str, str]] = [{} for _ in range(process.world_size)]
    dist.all_gather_object(gathered, facts, group=process.patient)
    first = gathered[0]
    problems = {
        name: Problem(name, f"{old} on rank 0 and {value} on rank {rank}", "", "start all ranks alike")
        for rank, others in enumerate(gathered)
        for name in first | others  # another version of the program may have other keys
        if (old := first.get(name, "unset")) != (value := others.get(name, "unset"))
    }
    if problems:
        raise ConfigError(problems.values())


def number_of_processes() -> int:
    """Return how many processes the launcher started, whether or not they are connected."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        found = f"{text!r} in the environment"
        raise ConfigError([Problem(name, found, "allowed: a whole number", "start with torchrun")])
    return int(text)


def _join(device: torch.device, rank: int, world_size: int) -> tuple[dist.Store, Any, Any]:
    """Connect to the other processes; return their store, and the groups for decisions of a step and for long waits."""
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    is_cuda = device.type == "cuda"
    try:
        # If torchrun keeps its store when it restarts the processes, the prefix hides addresses from earlier attempts.
        # Rank zero's own store is new each time, and a machine that joined later counts its attempts from 0.
        is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"
        shared_store = next(dist.rendezvous("env://", timeout=_JOIN_TIMEOUT))[0]
        store = dist.PrefixStore(f"{attempt} of {world_size}", shared_store)
        _check_same_kind(store, device, rank, world_size)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.PrefixStore("processes", store),
            rank=rank,
            world_size=world_size,
            timeout=STEP_TIMEOUT,
            device_id=device if is_cuda else None,
        )
        control = dist.new_group(backend="gloo", timeout=STEP_TIMEOUT) if is_cuda else dist.group.WORLD
        patient = dist.new_group(backend="gloo", timeout=_WAIT_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        unreachable = TrainingError(
            f"process {rank} of {world_size} cannot reach the others at {where} ({str(error).splitlines()[0]}); "
            "start all of them with torchrun, with the same address and a free port"
        )
        unreachable.is_reported_by_another_rank = False
        raise unreachable from error
    return store, control, patient


def _check_same_kind(store: dist.Store, device: torch.device, rank: int, world_size: int) -> None:
    """Raise `ConfigError` on every rank if some have a GPU and others have none: they would wait for each other."""
    store.set(f"device of {rank}", device.type)
    kinds = [store.get(f"device of {other}").decode() for other in range(world_size)]
    store.set(f"seen by {rank}", "")
    for other, kind in enumerate(kinds):
        if kind != kinds[0]:
            if rank == 0:  # the store may end with this process
                store.wait([f"seen by {other}" for other in range(world_size)])
            found = f"{kinds[0]} on rank 0 and {kind} on rank {other}"
            remedy = "check nvidia-smi on every machine, or set device.type=cpu"
            error = ConfigError([Problem("device.type", found, "", remedy)])
            error.is_reported_by_another_rank = rank != 0
            raise error


def _answer(question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
    """Return what the store answers; `otherwise` if it is gone, or behind a cut network, where it never answers."""
    answers: list[_Answer] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answers.append(question())

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
    return answers[0] if answers else otherwise


def _is_first_report(store: dist.Store, text: str) -> bool:
    """Return whether no other process has reported this text; True if the store cannot be reached."""

    def report() -> bool:
        store.add("reported", 1)
        return store.add(f"reported {hashlib.sha256(text.encode()).hexdigest()}", 1) == 1

    return _answer(report, True)
