"""Lets TorchTitan run on machines without an accelerator: processes on the CPU, joined by gloo.

TorchTitan asks PyTorch for the accelerator when ``torchtitan.tools.utils`` is imported, and where there is
none goes on as if it were CUDA. :func:`enable` answers "cpu" instead, and adds what TorchTitan asks of a
device and ``torch.cpu`` does not have. With an accelerator present it does nothing.

What stood in the way, with torch 2.13, and what is done about it:

- the device: ``tools.utils`` is the one place that asks, so its answer is replaced there, and only there. (To
  replace ``torch._utils._get_available_device_type`` itself would also change what PyTorch's own
  checkpoints and DataParallel do.)
- ``torch.cpu`` lacks the functions about names, properties and memory, and its ``current_device()`` is a string where
  ``barrier(device_ids=...)`` takes numbers: TorchTitan gets :class:`CpuDevice`, ``torch.cpu`` itself stays.
- FSDP's gradient divide factor 1.0 becomes a reduction with premultiplication, which gloo has not: FSDP is
  told to use plain sums where the factor is set.

Memory is the process's own: its resident set, with a peak that can be reset on Linux.
"""

import functools
import os
import platform
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._utils

__all__ = ["CpuDevice", "enable", "memory_capacity", "peak_memory", "processor_name", "reset_peak_memory"]


def enable() -> bool:
    """Makes TorchTitan use the CPU if there is no accelerator; call it before TorchTitan's modules are imported.

    Returns:
        Whether there is none, so that the CPU is used.
    """
    if torch._utils._get_available_device_type() is not None:
        return False

    from torchtitan.tools import utils

    device = CpuDevice()
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda device_type: device
    # Read once at import, before the lines above: read them again.
    utils.device_type, utils.device_module = utils.get_device_info()
    _reduce_gradients_by_plain_sums()
    return True


class CpuDevice(ModuleType):
    """``torch.cpu`` with the functions that TorchTitan asks of a device module, as of ``torch.cuda``."""

    def __init__(self) -> None:
        super().__init__("torch.cpu", "torch.cpu, and what TorchTitan asks of a device module beyond it")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return processor_name()

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=processor_name(), total_memory=memory_capacity())

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        # The operating system knows what is resident; it does not know what of that PyTorch's allocator uses.
        peak = peak_memory()
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        reset_peak_memory()

    def empty_cache(self) -> None:
        pass


def _reduce_gradients_by_plain_sums() -> None:
    from torch.distributed.fsdp import FSDPModule

    upstream = FSDPModule.set_gradient_divide_factor

    @functools.wraps(upstream)
    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        upstream(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor  # type: ignore[method-assign]


@functools.cache
def processor_name() -> str:
    """The processor's model, as far as the operating system tells."""
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


@functools.cache
def memory_capacity() -> int:
    """Bytes that this process can have: the machine's memory, or its control group's limit if that is lower."""
    limits = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits += _control_group_limits()
    return min(limits, default=1 << 40)


def _control_group_limits(root: Path = Path("/sys/fs/cgroup"), membership: str = "/proc/self/cgroup") -> list[int]:
    """Memory limits of the process's control groups, of both versions, and of all groups around them."""
    limits = []
    for line in _read(membership).splitlines():
        # One line is `number:controllers:path`; version 2 has no controllers.
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        # In a container the path may be the host's, and not exist here: the groups above it do.
        groups = [top / path.lstrip("/")]
        groups += [parent for parent in groups[0].parents if parent == top or top in parent.parents]
        for group in groups:
            text = _read(group / name).strip()
            if text.isdigit():
                limits.append(int(text))
    return limits


def peak_memory() -> int:
    """Most bytes that the process had resident since the start or the last reset."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    # Bytes on macOS, KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory() -> bool:
    """Lets :func:`peak_memory` count anew.

    Returns:
        Whether the operating system can do that; if not, the peak stays the one since the process's start.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
