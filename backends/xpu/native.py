"""What Intel's offline compiler makes of every shipped configuration: spills, registers, instructions, and what that lets expect.

python -m backends.xpu.native [--seed N --count N] [--json FILE]: compiles with Intel's Triton to SPIR-V, builds with ocloc for Ponte
Vecchio and DG2 (the version that Debian has does not know Battlemage), disassembles, prints a table, and fails for a spill (scratch
memory is one, but where it is known), a build that failed, or matrix instructions that are claimed and absent. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script of the other environment: behind its own packages.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from backends.xpu.shipped import Configuration, configurations, kernels, launch


@dataclass(frozen=True)
class Card:
    """What an estimate needs. bandwidth: bytes/s. engines: vector engines. clock: Hz. lanes: of one instruction in one cycle, fp32.

    Sources: Intel's product pages of Data Center GPU Max 1550 and Arc A770, and the Xe architecture's optimisation guide.
    """

    name: str
    bandwidth: float
    engines: int
    clock: float
    lanes: int


CARDS = {
    "pvc": Card("Data Center GPU Max 1550", 3.2768e12, 1024, 1.6e9, 16),
    "dg2": Card("Arc A770", 0.560e12, 512, 2.1e9, 8),
}


@dataclass(frozen=True)
class Built:
    """A configuration's native code. bytes_moved, instructions: of one program, which makes or reads `blocks` wire blocks.

    spills: registers that the compiler says it spilled, which it does not always say. scratch: messages to scratch memory, where such
    registers go, in the native code. expected: share of the card's memory bandwidth, from bytes and instructions counted; at most 1, 0
    where the bytes are not known.
    """

    configuration: str
    failure: str = ""
    lanes: int = 0
    warps: int = 0
    registers: int = 0
    spills: int = 0
    scratch: int = 0
    keeps_scratch: bool = False
    claims_dpas: bool = False
    dpas: int = 0
    sends: int = 0
    block_loads: int = 0
    instructions: int = 0
    bytes_moved: int = 0
    expected: float = 0.0

    @property
    def fault(self) -> str:
        """Why this may not ship, or nothing."""
        if self.failure:
            return f"does not build: {self.failure}"
        if self.spills:
            return f"spills {self.spills} registers"
        if self.scratch and not self.keeps_scratch:
            return f"keeps registers in scratch memory, {self.scratch} messages"
        return "claims matrix instructions and has none" if self.claims_dpas and not self.dpas else ""


# In the environment of the emulation.


class _Recorder:
    """A Triton driver that compiles for a card and keeps the modules instead of running them.

    kept: of each kernel by its name the module, ocloc's options and Triton's metadata.
    """

    def __init__(self, device: str, dpas: bool) -> None:
        from backends.xpu.opencl_driver import answer_for_the_loader

        answer_for_the_loader(device)
        self.utils = self
        self.device, self.dpas = device, dpas
        self.kept: dict[str, tuple[bytes, str, Any]] = {}
        self._metadata: Any = None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, name: str, module: bytes, shared: int, flags: str, device: int) -> tuple[int, int, int, int]:
        self.kept[name] = module, flags, self._metadata
        return 0, 0, 0, 0

    def launcher_cls(self, source, metadata):  # type: ignore[no-untyped-def]
        self._metadata = metadata
        return lambda *arguments: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):  # type: ignore[no-untyped-def]
        from triton.backends.compiler import GPUTarget

        from backends.xpu.opencl_driver import architecture

        return GPUTarget("xpu", architecture(self.device, self.dpas), 32)


def compiled(configuration: Configuration) -> tuple[bytes, str, Built]:
    """(SPIR-V, ocloc's options, what is known so far). Only where Intel's Triton is."""
    from triton.runtime.driver import driver

    recorder = _Recorder(configuration.device, dpas=False)
    driver.set_active(recorder)
    for kernel in kernels():
        kernel.device_caches.clear()
    made = launch(configuration)
    module, flags, metadata = recorder.kept[made.kernel]
    lanes = metadata.threads_per_warp
    return (
        module,
        flags,
        Built(
            str(configuration),
            keeps_scratch=configuration.keeps_scratch,
            lanes=lanes,
            warps=made.warps,
            bytes_moved=made.moved,
            claims_dpas=made.matrix,
        ),
    )


# With Intel's offline compiler.

OCLOC_SECONDS = 900
"""For one configuration: the largest takes some ten seconds."""
_SCRATCH = re.compile(r"scratch block (?:read|write)")
_INSTRUCTION = re.compile(r"^\s*(?:\([^)]*\)\s*)?([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)\s", re.MULTILINE)


def mix(assembly: str) -> Counter[str]:
    """How often each instruction stands in a disassembly."""
    return Counter(_INSTRUCTION.findall(assembly))


def built(configuration: Configuration, module: bytes, flags: str, known: Built, ocloc: tuple[Path, dict[str, str]]) -> Built:
    """Builds one module natively and reads what came out."""
    try:
        return _built(configuration, module, flags, known, ocloc)
    except subprocess.TimeoutExpired:
        return Built(str(configuration), failure=f"ocloc did not end within {OCLOC_SECONDS} s")


def _built(configuration: Configuration, module: bytes, flags: str, known: Built, ocloc: tuple[Path, dict[str, str]]) -> Built:
    compiler, variables = ocloc
    environment = {**os.environ, **variables}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "k.spv").write_bytes(module)
        command = ["compile", "-file", "k.spv", "-spirv_input", "-device", configuration.device, "-options", flags, "-out_dir", "."]
        made = subprocess.run([compiler, *command], cwd=place, env=environment, capture_output=True, text=True, timeout=OCLOC_SECONDS)
        said = made.stdout + made.stderr
        binaries = list(place.glob("*.bin"))
        if made.returncode or not binaries:
            return Built(str(configuration), failure=said.strip()[-300:] or "no output")
        command = ["disasm", "-file", binaries[0].name, "-device", configuration.device, "-dump", "out"]
        subprocess.run([compiler, *command], cwd=place, env=environment, capture_output=True, text=True, timeout=OCLOC_SECONDS)
        assembly = "\n".join(path.read_text() for path in (place / "out").glob("*.asm"))
    counts = mix(assembly)
    if not counts:
        return Built(str(configuration), failure="the native code cannot be disassembled")
    total = sum(counts.values())
    spills = sum(map(int, re.findall(r"spilled around (\d+)", said)))
    card = CARDS[configuration.device]
    # Every instruction of a program's sub-groups is issued once: an upper bound of the work, since branches are not all taken.
    issue = total * known.warps * max(1, known.lanes // card.lanes) / (card.engines * card.clock)
    expected = min(1.0, known.bytes_moved / card.bandwidth / issue)
    return Built(
        known.configuration,
        keeps_scratch=known.keeps_scratch,
        lanes=known.lanes,
        warps=known.warps,
        registers=256 if "256-GRF" in flags else 128,
        spills=spills,
        scratch=len(_SCRATCH.findall(assembly)),
        claims_dpas=known.claims_dpas,
        dpas=sum(count for name, count in counts.items() if name.startswith("dpas")),
        sends=sum(count for name, count in counts.items() if name.startswith("send")),
        block_loads=assembly.count("load_block") + assembly.count("_block2d"),
        instructions=total,
        bytes_moved=known.bytes_moved,
        expected=round(expected, 3),
    )


def chosen(count: int, seed: int) -> list[Configuration]:
    """A sample with each operation as often as the others, as far as `count` and they go, or all where `count` is 0."""
    every = configurations()
    if not count:
        return every
    shuffled = random.Random(seed).sample(every, len(every))
    met: Counter[str] = Counter()
    ranked = []
    for one in shuffled:
        met[one.operation] += 1
        ranked.append((met[one.operation], one))
    ranked.sort(key=lambda pair: pair[0])  # stable: the first of each operation, then the second of each
    return sorted((one for _, one in ranked[:count]), key=str)


def inspect(configurations: list[Configuration], ocloc: tuple[Path, dict[str, str]]) -> Iterator[Built]:
    """Builds them one after another. Only where Intel's Triton is."""
    for configuration in configurations:
        try:
            module, flags, known = compiled(configuration)
        except Exception as error:  # whatever the compiler raises is a build that failed
            yield Built(str(configuration), failure=f"{type(error).__name__}: {str(error)[-300:]}")
            continue
        yield built(configuration, module, flags, known, ocloc)


def table(results: list[Built]) -> str:
    """One line a configuration."""
    head = (
        f"{'configuration':52} {'spills':>6} {'scratch':>7} {'regs':>4} {'lanes':>5} {'warps':>5} {'instr':>6} {'sends':>5} {'dpas':>4} "
        f"{'bandwidth':>9}"
    )
    lines = [head]
    for result in results:
        lines.append(
            f"{result.configuration:52} {result.spills:6} {result.scratch:7} {result.registers:4} {result.lanes:5} {result.warps:5} "
            f"{result.instructions:6} {result.sends:5} {result.dpas:4} {f'{result.expected:.0%}' if result.expected else '':>9}  "
            f"{result.fault}".rstrip()
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=0, help="a sample of so many configurations (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    from backends.xpu.environment import need_environment
    from bridge.cache_folder import cache_folder
    from bridge.errors import KVBridgeError

    try:
        environment = need_environment()
        ocloc = environment.ocloc()
        if Path(sys.prefix).resolve() != environment.folder.resolve():
            settings = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTHON"))}
            settings["TRITON_CACHE_DIR"] = str(cache_folder() / "xpu" / "triton")
            settings["PYTHONPATH"] = ""
            os.execve(environment.python, [str(environment.python), "-P", __file__, *sys.argv[1:]], settings)
    except KVBridgeError as error:
        print(error, file=sys.stderr)
        return 2
    if ocloc is None:
        print("Intel's offline compiler (ocloc) is not here; make xpu-env takes it from Debian's packages", file=sys.stderr)
        return 2
    results = []
    for result in inspect(chosen(options.count, options.seed), ocloc):
        results.append(result)
        print(table([result]).splitlines()[1] if len(results) > 1 else table([result]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    faults = [result for result in results if result.fault]
    print(f"{len(results)} configurations, {len(faults)} with a fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
