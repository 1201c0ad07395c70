"""Running without an accelerator: what TorchTitan asks of its device, and where the numbers come from."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchtitan  # noqa: F401
from torchtitan.tools import utils
from zephon_patches.titan import cpu

REPOSITORY = Path(__file__).resolve().parents[2]

without_accelerator = pytest.mark.skipif(
    torch._utils._get_available_device_type() is not None, reason="this machine has an accelerator"
)
on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux alone")


@without_accelerator
def test_the_device_is_settled_before_upstreams_modules_read_it():
    from torchtitan.components import metrics
    from torchtitan.distributed import utils as distributed_utils

    for module in (utils, metrics, distributed_utils):
        assert module.device_type == "cpu"
        assert isinstance(module.device_module, cpu.CpuDevice)
    assert utils.get_device_info() == ("cpu", utils.device_module)


@without_accelerator
def test_pytorch_itself_is_left_alone():
    assert torch._utils._get_available_device_type() is None
    assert torch.cpu.current_device() == "cpu"
    assert not hasattr(torch.cpu, "memory_stats")


def test_nothing_happens_where_an_accelerator_is_present(monkeypatch):
    before = dict(vars(utils))
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(cpu, "_reduce_gradients_by_plain_sums", lambda: pytest.fail("FSDP was patched"))
    assert cpu.enable() is False
    assert vars(utils) == before


def test_the_device_has_what_torchtitan_asks_of_one():
    device = cpu.CpuDevice()
    assert device.current_device() == 0, "barrier(device_ids=...) takes numbers"
    assert device.get_device_name(torch.device("cpu")) == cpu.processor_name() != ""
    assert device.get_device_properties("cpu:0").total_memory == cpu.memory_capacity() > 2**28
    stats = device.memory_stats()
    assert stats["active_bytes.all.peak"] == stats["reserved_bytes.all.peak"] > 2**20
    assert stats["num_alloc_retries"] == stats["num_ooms"] == 0
    device.reset_peak_memory_stats()
    device.empty_cache()
    # The rest is torch.cpu's.
    device.set_device(torch.device("cpu"))
    device.synchronize()
    assert device.device_count() == torch.cpu.device_count()
    with pytest.raises(AttributeError):
        device.nonesuch  # noqa: B018


@without_accelerator
def test_torchtitans_memory_monitor_reports_the_process():
    from torchtitan.components.metrics import build_device_memory_monitor

    monitor = build_device_memory_monitor()
    stats = monitor.get_peak_stats()
    assert 0 < stats.max_reserved_gib < monitor.device_capacity_gib
    assert 0 < stats.max_reserved_pct < 100


@on_linux
def test_the_peak_rises_with_use_and_can_be_reset():
    for _ in range(20):
        assert cpu.reset_peak_memory()
        before = cpu.peak_memory()
        block = bytearray(b"x") * (64 << 20)
        peak = cpu.peak_memory()
        if peak - before > 48 << 20:
            break
        block = bytearray()  # the kernel has reclaimed as much in the meantime, of a process with idle memory
    assert peak - before > 48 << 20
    del block
    # The kernel's counters are a few pages per core behind.
    assert abs(cpu.peak_memory() - peak) < 8 << 20
    assert cpu.reset_peak_memory()
    assert cpu.peak_memory() < peak - (32 << 20)


def test_without_proc_the_peak_is_the_processs_own_and_cannot_be_reset(monkeypatch):
    monkeypatch.setattr(cpu, "_read", lambda path: "")
    assert cpu.peak_memory() > 2**20

    def refuse(self, text):
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert cpu.reset_peak_memory() is False


def limits_of(tmp_path: Path, membership: str, files: dict[str, str]) -> list[int]:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    return sorted(cpu._control_group_limits(tmp_path / "cgroup", str(tmp_path / "membership")))


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("", {}, []),
        ("0::/\n", {"memory.max": "max\n"}, []),
        ("0::/\n", {"memory.max": "4096\n"}, [4096]),
        # All groups around the process's own count.
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "500", "a/b/memory.max": "700"}, [500, 700]),
        # In a container the path may be the host's.
        ("0::/docker/1234\n", {"memory.max": "900"}, [900]),
        # Version 1: one line per controller.
        (
            "5:cpu,cpuacct:/x\n4:memory:/x\n",
            {"memory/memory.limit_in_bytes": "9000", "memory/x/memory.limit_in_bytes": "800", "cpu/x/memory.max": "1"},
            [800, 9000],
        ),
    ],
)
def test_a_control_groups_limit_is_found(tmp_path, membership, files, expected):
    assert limits_of(tmp_path, membership, files) == expected


def test_the_capacity_is_the_lower_of_machine_and_control_group(monkeypatch):
    machine = cpu.memory_capacity.__wrapped__()
    monkeypatch.setattr(cpu, "_control_group_limits", lambda: [1 << 20, 1 << 62])
    assert cpu.memory_capacity.__wrapped__() == 1 << 20
    monkeypatch.setattr(cpu, "_control_group_limits", lambda: [1 << 62])
    assert cpu.memory_capacity.__wrapped__() >= machine


@without_accelerator
def test_fsdp_reduces_by_plain_sums_where_the_divide_factor_is_set():
    # Premultiplied sums, which FSDP takes for a factor of 1.0, do not exist in gloo.
    code = """
import torch, torch.distributed as dist, torchtitan
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (1,)))
group = model._get_fsdp_state()._fsdp_param_group
assert not group.force_sum_reduction_for_comms
model.set_gradient_divide_factor(1.0)
assert group.force_sum_reduction_for_comms and group.gradient_divide_factor == 1.0
model(torch.ones(2, 4)).sum().backward()
assert model.weight.grad.full_tensor().eq(2).all()
dist.destroy_process_group()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
