"""The ranks of one tensor-parallel target as a group that can add, gather and broadcast tensors.

The only module that touches torch.distributed. Groups are objects, never the process's default one, so one process can
hold several. Knows nothing of models. Every wait is bounded by the group's timeout, or by one given for that call.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # the classes behind torch.distributed's functions

# Without a bound of its own: whoever uses this must end when its peers do (verifier_service/lifeline.py).
_A_YEAR = timedelta(days=365)


class Meeting:
    """Where the ranks of one target find each other. Rank 0 opens it, and `port` 0 lets the system choose one.

    `check` is called now and then while this rank waits for others, and may raise.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        assert 0 <= rank < size, (rank, size)
        self.host, self.rank, self.size = host, rank, size
        self._check = check
        self._timeout = timedelta(seconds=timeout_s)
        self.store = c10d.TCPStore(host, port, None, rank == 0, self._timeout, wait_for_workers=False)
        self.port = int(self.store.port)

    def group(self, name: str, device: torch.device, timeout_s: float) -> "RankGroup":
        """The group of that name; all ranks must ask for it in the same order. NCCL for GPUs, gloo elsewhere."""
        store = c10d.PrefixStore(name, self.store)
        make = _nccl if device.type == "cuda" else _gloo
        return RankGroup(make(store, self, timedelta(seconds=timeout_s)), self, name)

    def wait_for_all(self, name: str) -> None:
        """Returns when every rank has come here; raises TimeoutError after the meeting's timeout."""
        if self.store.add(f"{name}/arrived", 1) == self.size:
            self.store.set(f"{name}/complete", "yes")
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        while not self.store.check([f"{name}/complete"]):
            self._check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"rank {self.rank} waited {self._timeout} for the others at {name}")
            time.sleep(0.02)  # the store's own wait logs a warning whenever it is cut short


class RankGroup:
    """Collectives among the ranks. Each call must be made by every rank, in the same order."""

    def __init__(self, group: Any, meeting: Meeting, name: str) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._group = group
        self._meeting = meeting  # keeps the store alive
        self._name = name
        self._met = 0

    def wait_for_all(self) -> None:
        """Meet before the next collective, however long the ranks took to get there."""
        self._met += 1
        self._meeting.wait_for_all(f"{self._name}/{self._met}")

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of tensors of one shape, in place."""
        self._group.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor (all of one shape) in the order of ranks, on rank 0; nothing elsewhere."""
        options = c10d.GatherOptions()
        options.rootRank = 0
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        self._group.gather([found] if found else [], [tensor], options).wait()
        return found

    def broadcast(self, tensor: Tensor, *, patient: bool = False) -> None:
        """Rank 0's tensor to all, in place. `patient` waits for as long as rank 0 lives."""
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        if patient:
            options.timeout = _A_YEAR
        self._group.broadcast([tensor], options).wait()


def _gloo(store: c10d.Store, meeting: Meeting, timeout: timedelta) -> Any:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By address: gloo's default is to resolve the host's own name, which need not exist.
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=meeting.host)]
    options._timeout = timeout
    return c10d.ProcessGroupGloo(store, meeting.rank, meeting.size, options)


def _nccl(store: c10d.Store, meeting: Meeting, timeout: timedelta) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(store, meeting.rank, meeting.size, options)
