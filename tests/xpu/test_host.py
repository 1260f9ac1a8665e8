"""What needs neither an Intel GPU nor the emulation's environment."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import runpy
import socket
import struct
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from backends.xpu import environment, frames, native, probe, spirv
from backends.xpu.attend import attend_tuning
from backends.xpu.described import Places, cache_of, layers_as_messages, shares_as_messages, shares_of
from backends.xpu.shipped import HEAD_DIMS, TURBOQUANT
from bridge.codecs import declared
from bridge.devices import DeviceError, open_device
from bridge.pages import LayerPages, OpaquePages, PagedCache, PagesDoNotFit, SlotPages
from bridge.transfer.agent import takes
from bridge.transfer.level_zero import level_zero_in_ucx
from bridge.transfer.nixl import NixlAgent
from tests.conformance.cases import Case, chunks, source


def instruction(opcode: int, *words: int) -> list[int]:
    return [(len(words) + 1) << 16 | opcode, *words]


def module(*parts: list[int]) -> bytes:
    return np.array([spirv.MAGIC, 0x10400, 0, 9, 0, *(word for part in parts for word in part)], np.uint32).tobytes()


def text(words: bytes) -> list[int]:
    return np.frombuffer(words + bytes(4 - len(words) % 4), np.uint32).tolist()


def test_only_what_the_runtime_refuses_leaves_a_module() -> None:
    kernel, addresses = instruction(17, 6), instruction(17, 4)
    hint, vectors = instruction(17, 5892), instruction(17, 5606)
    extension = instruction(10, *text(b"SPV_INTEL_kernel_attributes"))
    other = instruction(10, *text(b"SPV_KHR_no_integer_wrap_decoration"))
    size, lanes = instruction(16, 5, 5893, 128, 1, 1), instruction(16, 5, 35, 16)
    whole = module(kernel, hint, addresses, vectors, extension, other, size, lanes)
    assert spirv.for_cpu_runtime(whole) == module(kernel, addresses, other, lanes)


@pytest.mark.parametrize("bad", [b"", bytes(20), module([0]), module([9 << 16 | 17])])
def test_what_is_no_module_is_refused(bad: bytes) -> None:
    with pytest.raises(spirv.BadModule):
        spirv.for_cpu_runtime(bad)


def test_frames_are_bounded_and_typed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send(ours, frames.Hello())
        assert frames.receive_call(theirs) == frames.Hello()
        theirs.sendall(struct.pack("<I", frames.MAX_FRAME + 1))
        with pytest.raises(frames.BadFrame):
            frames.receive_answer(ours)
        body = msgspec.msgpack.encode({"type": "run", "code": "x"})
        ours.sendall(struct.pack("<I", len(body)) + body)
        with pytest.raises(frames.BadFrame):
            frames.receive_call(theirs)
        ours.close()
        assert frames.receive_call(theirs) is None


def test_pages_keep_layout_and_alignment_in_shared_memory() -> None:
    codec, meaning = declared("turboquant_4bit_nc"), "test/rows"
    floats = torch.randn(3, 16, 2, 64)[:, :, :, ::2]
    slots = torch.randint(0, 256, (3, 16, 2, 2 * codec.for_layer(64, declared_element()).slot_bytes(64)), dtype=torch.uint8)
    opaque = torch.randint(0, 256, (4, 16, 2, 24), dtype=torch.uint8)
    cache = PagedCache(
        {2: LayerPages.nhd(floats, floats), 5: SlotPages.rows(slots, codec, 64), 7: OpaquePages(opaque, meaning)}, first_head=3
    )
    places = Places(100)
    messages = layers_as_messages(cache, [7, 2, 5, 2], places)
    memory = np.zeros(places.end, np.uint8)
    assert len(places.storages) == 3
    for held, place in places.storages.values():
        memory[place : place + held.size] = held
        assert (place - held.ctypes.data) % frames.ALIGNMENT == 0
    found = cache_of(messages, 3, memory)
    assert found.first_head == 3
    for index, layer in cache.layers.items():
        other = found.layers[index]
        assert type(other) is type(layer)
        for mine, its in zip(layer.sides, other.sides, strict=True):
            assert (mine is None) == (its is None)
            if mine is not None and its is not None:
                assert mine.coding == its.coding
                assert mine.codes.stride() == its.codes.stride()
                assert torch.equal(mine.codes, its.codes)


def declared_element():
    from bridge.wire import Element

    return Element.BF16


def test_places_outside_the_shared_memory_are_refused() -> None:
    places = Places(0)
    messages = layers_as_messages(PagedCache({0: LayerPages.nhd(torch.zeros(2, 16, 1, 64), torch.zeros(2, 16, 1, 64))}), [0], places)
    with pytest.raises(PagesDoNotFit):
        cache_of(messages, 0, np.zeros(64, np.uint8))


def test_shares_cross_unchanged() -> None:
    case = Case("turboquant_3bit_nc")
    for share in chunks(case.manifest(), source(case).cache):
        assert shares_of(shares_as_messages(share.shares)) == list(share.shares)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
        ("Intel(R) Arc(TM) A770 Graphics", "dg2"),
        ("Intel(R) Arc(TM) B580 Graphics", "bmg"),
        ("Intel(R) Something New", ""),
    ],
)
def test_architectures(name: str, architecture: str) -> None:
    assert probe.architecture_of(name) == architecture


def test_a_host_without_intel_packages_gets_one_sentence_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And everything else works: the other devices open, and probe and list."""
    monkeypatch.setenv("KVBRIDGE_XPU_ENV", str(tmp_path))
    monkeypatch.delattr(torch, "xpu", raising=False)
    for device, words in (("xpu", "torch"), ("xpu-emulated", "make xpu-env")):
        with pytest.raises(DeviceError, match=words) as failure:
            open_device(device)
        said = str(failure.value)
        assert "\n" not in said
        assert device in said or "emulated XPU" in said
    for device in ("cpu", "cpu-reference"):
        assert open_device(device).probe()


@pytest.mark.slow
def test_the_doctor_says_what_is_missing_for_which_device(tmp_path: Path) -> None:
    settings = {**os.environ, "KVBRIDGE_XPU_ENV": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "bridge", "doctor"], cwd=environment.ROOT, env=settings, capture_output=True, text=True)
    lines = {name: [line for line in done.stdout.splitlines() if line.split()[:1] == [name]] for name in ("xpu", "xpu-emulated", "cpu")}
    assert all(len(found) == 1 for found in lines.values()), done.stdout + done.stderr
    assert "make xpu-env" in lines["xpu-emulated"][0]
    assert "Traceback" not in done.stdout + done.stderr


class FakeXpu:
    """What torch.xpu says on a host with one card."""

    def __init__(self, cards: int = 1) -> None:
        self.cards = cards

    def is_available(self) -> bool:
        return self.cards > 0

    def device_count(self) -> int:
        return self.cards

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name="Intel(R) Data Center GPU Max 1550", total_memory=64 << 30, driver_version="1.6.31")


def test_what_a_card_is_and_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "xpu", "20250302", raising=False)
    monkeypatch.setattr(torch, "xpu", FakeXpu(0), raising=False)
    with pytest.raises(DeviceError, match="no Intel GPU is visible here"):
        probe.find_card(0)
    monkeypatch.setattr(torch, "xpu", FakeXpu(1))
    with pytest.raises(DeviceError, match="no xpu:1; 1 are visible"):
        probe.find_card(1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="needs Intel's Triton"):
        probe.find_card(0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    assert str(probe.find_card(0)) == "Intel(R) Data Center GPU Max 1550 (xpu:0), pvc, driver 1.6.31, 64 GiB"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.10+xpu")
    assert str(probe.find_card(0)).endswith("64 GiB, Intel's extension for PyTorch 2.8.10+xpu")


def test_the_device_says_where_it_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from backends.xpu.device import XpuDevice
    from bridge.counters import Counters

    device = XpuDevice.__new__(XpuDevice)
    device.card = probe.Card(0, "a card", "", 1 << 30, "1", "")
    device.torch_device, device.scratch_bytes, device.counters = "xpu:0", 96 << 20, Counters()
    monkeypatch.setenv("UCX_MODULE_DIR", str(tmp_path))
    said = device.probe()
    assert "Ponte Vecchio's launch parameters" in said
    assert "staged in pinned host memory" in said
    (tmp_path / "libuct_ze.so").touch()
    assert f"staged in its own memory, which NIXL can read with {tmp_path}" in device.probe()


def test_an_environment_of_an_older_version_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("KVBRIDGE_XPU_ENV", str(tmp_path))
    (tmp_path / ".ready").write_text("kvbridge xpu environment 0\n")
    assert environment.find_environment() is None
    (tmp_path / ".ready").write_text(environment.STAMP + "\n")
    assert environment.find_environment() == environment.XpuEnvironment(tmp_path)


def test_pins_are_those_of_the_constraints() -> None:
    lines = (environment.ROOT / "constraints-xpu.txt").read_text().splitlines()
    assert tuple(line for line in lines if not line.startswith("#")) == environment.PINS


def test_level_zero_is_found_where_ucx_keeps_modules(tmp_path: Path) -> None:
    assert level_zero_in_ucx((tmp_path,)) is None
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / "libuct_ze.so.0").touch()
    assert level_zero_in_ucx((tmp_path,)) == tmp_path / "ucx" / "libuct_ze.so.0"


def test_nixl_takes_xpu_memory_only_with_level_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere::{tmp_path}")
    monkeypatch.delenv("UCX_MODULE_DIR", raising=False)
    agent = NixlAgent.__new__(NixlAgent)
    assert [takes(agent, kind) for kind in ("cpu", "cuda", "xpu")] == [True, True, False]
    (tmp_path / "libuct_ze.so").touch()
    assert takes(agent, "xpu")


def test_what_the_environment_cannot_get_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No half-made environment counts, whichever source is missing."""
    monkeypatch.setattr(environment, "PINS", ("kvbridge-no-such-package==1",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("KVBRIDGE_XPU_ENV", str(tmp_path / "made"))
    with pytest.raises(environment.SourceMissing, match="Intel's Triton and OpenCL runtime cannot be had, python") as failure:
        environment.make(tmp_path / "made")
    assert "\n" not in str(failure.value)
    assert environment.find_environment() is None
    monkeypatch.setenv("PATH", "")
    with pytest.raises(environment.SourceMissing, match=r"offline compiler is not here.*--without-ocloc"):
        environment._need_ocloc(tmp_path)


def test_the_report_turns_red() -> None:
    good = native.Built("a", instructions=10, expected=1.0)
    assert not good.fault
    faults = ({"failure": "x"}, {"spills": 1}, {"scratch": 1}, {"claims_dpas": True})
    for bad in (native.Built("a", **fault) for fault in faults):
        assert bad.fault
        assert bad.fault in native.table([bad])
    assert not native.Built("a", claims_dpas=True, dpas=4).fault
    assert not native.Built("a", scratch=40, keeps_scratch=True).fault


def test_instructions_are_counted() -> None:
    assembly = "L0:\n  (W) mov (16|M0) r1.0<1>:ud 0x0:ud\n      send.ugm (32|M0) r2 r3 null:0\n(f0.0)  dpas.8x8 (16|M0) r1:f\n// a remark\n"
    assert native.mix(assembly) == {"mov": 1, "send.ugm": 1, "dpas.8x8": 1}


def test_every_shipped_configuration_is_inspected() -> None:
    every = native.configurations()
    assert len(set(every)) == len(every) == len(set(map(str, every))) == 582
    assert sum(one.keeps_scratch for one in every) == 36 + 9 + 1
    assert {one.device for one in every} == set(native.CARDS)
    assert native.chosen(0, 1) == every


def test_attend_has_parameters_for_every_card() -> None:
    for preset, dim in product(TURBOQUANT, HEAD_DIMS):
        assert attend_tuning("bmg", preset, dim) == attend_tuning("", preset, dim) == attend_tuning("pvc", preset, dim)
        for architecture, threads in {"pvc": 32, "dg2": 64}.items():
            tuning = attend_tuning(architecture, preset, dim)
            assert tuning.programs * tuning.warps == threads  # of an Xe core, with large registers
            assert tuning.large_registers


@pytest.mark.parametrize("seed", [1, 5])
def test_a_sample_has_every_operation(seed: int) -> None:
    sample = native.chosen(12, seed)
    assert len(set(sample)) == 12
    assert {one.operation for one in sample} == {one.operation for one in native.configurations()}
    assert {one.device for one in sample} == set(native.CARDS)
    assert native.chosen(12, seed) == sample


@pytest.mark.slow
@pytest.mark.parametrize("example", ["cuda_to_cuda.py", "cuda_to_xpu.py"])
def test_examples_without_an_nvidia_gpu_say_so_in_one_sentence(example: str) -> None:
    settings = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, f"examples/{example}", "raw"], cwd=environment.ROOT, env=settings, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "CUDA" in done.stderr or "NVIDIA" in done.stderr


def run_example(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> int:
    """Its exit code; in this process, which has imported torch already."""
    monkeypatch.syspath_prepend(str(environment.ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    try:
        runpy.run_path(str(environment.ROOT / "examples" / script), run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["xpu_to_cpu.py", "--help"], 0, "python examples/xpu_to_cpu.py [codec]"),
        (["device_pair.py", "--help"], 0, "python examples/device_pair.py PREFILLER DECODER"),
        (["cpu_to_cpu.py", "--help"], 0, "python examples/cpu_to_cpu.py [codec]"),
        (["cuda_to_xpu.py", "raw", "device"], 2, "Payloads are staged in host memory"),
        (["device_pair.py", "cpu", "cpu", "raw", "gpu"], 2, "there is no staging 'gpu'; choose one of auto, host, device"),
        (["cpu_to_cpu.py", "row"], 2, "there is no codec named 'row'"),
    ],
    ids=str,
)
def test_what_an_example_is_asked(
    arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--help was taken for a codec, a word too many was passed over, and an unknown staging was taken for the device's own memory."""
    assert run_example(monkeypatch, *arguments) == code
    printed = capsys.readouterr()
    assert said in (printed.err if code else printed.out)
    assert "opening the device" not in printed.err


@pytest.mark.parametrize("example", ["cuda_to_xpu.py", "xpu_to_cuda.py", "xpu_to_cpu.py"])
def test_examples_between_two_kinds_stage_where_both_can(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" a card's own memory was taken where the agent takes it, and the other end refuses that: staging_differs."""
    asked = []
    monkeypatch.syspath_prepend(str(environment.ROOT / "examples"))
    monkeypatch.setattr(importlib.import_module("device_pair"), "run", lambda *arguments: asked.append(arguments) or 0)
    assert run_example(monkeypatch, example, "raw") == 0
    assert asked == [(*example.removesuffix(".py").split("_to_"), "raw", "host")]
