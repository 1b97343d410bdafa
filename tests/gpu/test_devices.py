"""Device profiles: names, figures and their bounds, overrides."""

import json
import subprocess
import sys
from importlib import resources

import pytest

from llmem.errors import LlmemError
from llmem.gpu.devices import MIB, Figure, get_device, list_devices

REQUIRED = ["cpu", "v100-16gb", "v100-32gb", "t4", "a10g", "l4", "l40s", "rtx2060", "rtx3060",
            "rtx3090", "rtx4060", "rtx4090", "rtx5090", "rtx6000-ada", "a100-40gb", "a100-80gb",
            "a800-80gb", "h100-80gb", "h200", "b200"]


@pytest.mark.parametrize("name", REQUIRED)
def test_required_devices_are_known(name: str) -> None:
    assert get_device(name).name == name


@pytest.mark.parametrize(("spelling", "name"), [
    ("A100", "a100-80gb"), ("a100_40gb", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ("H100", "h100-80gb"), ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("RTX 4090", "rtx4090"),
    ("NVIDIA GeForce RTX 3060", "rtx3060"), ("Tesla T4", "t4"), ("CPU", "cpu"),
    ("Tesla V100-SXM2-16GB", "v100-16gb"), ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
])
def test_spellings(spelling: str, name: str) -> None:
    assert get_device(spelling).name == name


def test_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(LlmemError, match="a100-80gb"):
        get_device("a100-90gb")


def test_every_figure_has_source_and_ordered_bounds() -> None:
    for device in list_devices():
        if not device.is_cuda:
            continue
        assert device.smi_total is not None
        assert device.sm_count > 0 and device.max_threads_per_sm >= 1024
        assert device.shared_memory_per_block >= 64 * 1024
        assert device.capacity_figure.high <= device.smi_total
        figures = (device.capacity_figure, device.context, device.handles, device.nccl(2), device.nccl(8))
        for figure in figures:
            assert figure.source
            assert figure.low <= figure.value <= figure.high


def test_aliases_are_unique() -> None:
    text = resources.files("llmem.gpu").joinpath("profiles/nvidia.json").read_text()
    spellings = [s for d in json.loads(text)["devices"] for s in (d["name"], *d["aliases"])]
    assert len(spellings) == len(set(spellings))


def test_capacity_is_the_drivers_not_the_box() -> None:
    a100 = get_device("a100-80gb")
    assert a100.smi_total == 81920 * MIB
    assert a100.capacity == 81152 * MIB  # 79.25 GiB in torch's OOM message


def test_cpu_has_neither_context_nor_handles() -> None:
    cpu = get_device("cpu")
    assert not cpu.is_cuda
    assert cpu.capacity == 0
    assert cpu.overhead([8, 2]).value == 0


def test_overhead_sums_figures_and_bounds() -> None:
    device = get_device("h100")
    alone, two = device.overhead(), device.overhead([1, 2, 8])
    assert alone.value == device.context.value + device.handles.value
    assert two.value == alone.value + device.nccl(2).value + device.nccl(8).value
    assert two.low == alone.low + device.nccl(2).low + device.nccl(8).low
    assert two.high == alone.high + device.nccl(2).high + device.nccl(8).high


def test_override_replaces_a_figure_and_its_uncertainty() -> None:
    device = get_device("l4").override(context=300 * MIB, capacity=10 * 2**30, nccl=MIB)
    assert device.context == Figure.exactly(300 * MIB, "given by the user")
    assert device.capacity == 10 * 2**30
    assert device.nccl(2) == device.nccl(64) and device.nccl(2).value == MIB
    assert device.handles == get_device("l4").handles
    with pytest.raises(LlmemError, match="negative"):
        device.override(context=-1)


def test_importing_devices_needs_no_torch() -> None:
    code = ("import sys, llmem.gpu.devices as d, llmem.gpu.scratch, llmem.gpu.sdpa\n"
            "d.get_device('h100'); assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
