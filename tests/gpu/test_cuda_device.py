"""The CUDA device on a card: streams, graphs, memory, and a hand-off between two processes. Its bytes: tests/conformance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge.devices import DeviceError, open_device
from bridge.wire.errors import BadTag
from tests.conformance.cases import Case, chunks, compare_payload, reference_pack, source

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def device():
    return open_device("cuda")


def packed(device, case: Case, mine, after=None) -> torch.Tensor:
    (share,) = chunks(case.manifest(), mine.cache)
    out = torch.full((share.nbytes,), 0xCD, dtype=torch.uint8, device="cuda")
    device.pack(mine.cache, mine.table, share.shares, case.keys(), out, **({} if after is None else {"after": after}))
    return out


CASE = Case("turboquant_4bit_nc", head_dim=128, first=0, end=60)


def test_masks_made_on_the_card_are_the_hosts(device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, tags included, and each lands the other's."""
    mine, made = source(CASE, "cuda"), []
    (share,) = chunks(CASE.manifest(), mine.cache)
    for on_host in (0, 1 << 30):
        monkeypatch.setattr(device, "host_masks", on_host)
        made.append(packed(device, CASE, mine))
    assert torch.equal(*made)
    for on_host in (0, 1 << 30):
        monkeypatch.setattr(device, "host_masks", on_host)
        device.land(mine.cache, mine.table, share.shares, CASE.keys(), made[0], CASE.first, CASE.end)
    made[0][5] ^= 1
    monkeypatch.setattr(device, "host_masks", 0)
    with pytest.raises(BadTag):
        device.land(mine.cache, mine.table, share.shares, CASE.keys(), made[0], CASE.first, CASE.end)


def test_pack_waits_for_the_engines_stream(device) -> None:
    """Pages that are written by work which is only queued: on the current stream, and on another one through its mark."""
    good = source(CASE)
    (share,) = chunks(CASE.manifest(), good.cache)
    expected = reference_pack(good, share, CASE.keys())
    for explicit in (False, True):
        mine = source(CASE, "cuda")
        kept = [tensor.clone() for tensor in mine.backing]
        for tensor in mine.backing:
            tensor.zero_()
        engine = torch.cuda.Stream()
        engine.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(engine):
            torch.cuda._sleep(200_000_000)
            for tensor, values in zip(mine.backing, kept, strict=True):
                tensor.copy_(values)
            if not explicit:
                got = packed(device, CASE, mine)
            mark = device.mark()
        if explicit:
            got = packed(device, CASE, mine, mark)
        compare_payload(device, share, CASE.keys(), got.cpu().numpy(), expected)


def test_the_engines_stream_is_not_waited_for(device) -> None:
    """What is queued after the mark goes on while the pages are packed."""
    mine = source(CASE, "cuda")
    packed(device, CASE, mine)
    engine = torch.cuda.Stream()
    engine.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    with torch.cuda.stream(engine):
        mark = device.mark()
        torch.cuda._sleep(1_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
    packed(device, CASE, mine, mark)
    assert not busy.query()
    torch.cuda.synchronize()


def test_a_captured_graph_is_refused(device) -> None:
    mine = source(CASE, "cuda")
    before = packed(device, CASE, mine)
    torch.cuda.synchronize()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(DeviceError, match="graph"):
            device.mark()
        with pytest.raises(DeviceError, match="graph"):
            device.pack(mine.cache, mine.table, (), CASE.keys(), x.view(torch.uint8))
    graph.replay()
    assert torch.equal(packed(device, CASE, mine), before)
    assert x.tolist() == [1, 1, 1, 1]


def test_pages_that_a_graph_computes_are_packed(device) -> None:
    mine = source(CASE, "cuda")
    kept = [tensor.clone() for tensor in mine.backing]
    expected = packed(device, CASE, mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor, values in zip(mine.backing, kept, strict=True):
            tensor.copy_(values)
    for tensor in mine.backing:
        tensor.zero_()
    graph.replay()
    assert torch.equal(packed(device, CASE, mine), expected)


def test_probe_says_what_the_card_is(device) -> None:
    said = device.probe()
    assert torch.cuda.get_device_name(0) in said
    assert "compute capability" in said
    with pytest.raises(DeviceError, match="cuda:99"):
        open_device("cuda:99")


def test_staging_is_pinned_or_the_cards(device) -> None:
    assert device.allocate_staging(1 << 20).tensor.is_pinned()
    assert device.allocate_memory(1 << 20).tensor.is_cuda


@pytest.mark.parametrize("setting", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: true"])
def test_memory_that_no_other_process_can_open_is_refused(device, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    with pytest.raises(DeviceError, match="expandable_segments"):
        device.allocate_memory(1 << 20)


@pytest.mark.parametrize("arguments", [("turboquant_4bit_nc", "auto"), ("raw", "host")])
def test_the_example_hands_over(arguments: tuple[str, str]) -> None:
    """Two processes over NIXL, staged in the cards' memory and in pinned memory."""
    command = [sys.executable, str(ROOT / "examples" / "cuda_to_cuda.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    sent, received = (line.partition(":")[2].strip() for line in done.stdout.splitlines()[-2:])
    a, b = (torch.tensor([float(x) for x in text.strip("[]").split(",")]) for text in (sent, received))
    assert torch.isfinite(b).all()
    assert torch.equal(a, b) if arguments[0] == "raw" else torch.allclose(a, b, rtol=0.02)
