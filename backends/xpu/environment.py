"""The environment of the emulated XPU: Intel's Triton, Intel's OpenCL runtime for CPUs, and Intel's offline compiler.

python -m backends.xpu.environment [FOLDER] [--without-ocloc] makes it; `make xpu-env` does that for .venv-xpu. It takes torch and
everything else from the environment that makes it, and needs no root: Debian's packages are unpacked, not installed. Two sources are asked:
the Python package index for PINS, and Debian's archive (bookworm, through apt-get) for the offline compiler. What cannot be had ends it
with a sentence, and what was made until then does not count as an environment.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bridge.devices import DeviceError

ROOT = Path(__file__).resolve().parents[2]
STAMP = "kvbridge xpu environment 1"
"""Raise the number when an environment made before is not enough."""
PINS = ("triton-xpu==3.3.0b1", "intel-opencl-rt==2026.2.0", "intel-cmplr-lib-rt==2026.2.0", "tbb==2023.2.0")
"""As in constraints-xpu.txt."""
_DEBIAN = (
    "intel-opencl-icd",
    "libigc1",
    "libigdfcl1",
    "libigdgmm12",
    "libopencl-clang14",
    "libllvmspirvlib14",
    "libllvm14",
    "libclang-cpp14",
)
# What a small system may lack of the libraries that those need.
_DEBIAN_MORE = ("libedit2", "libbsd0", "libmd0", "libxml2", "libicu72", "libz3-4")
_NOT_NEEDED = ("triton/backends/nvidia", "triton/backends/amd")


class EnvironmentMissing(DeviceError):
    """The emulated XPU's own environment is not there."""

    clause = "xpu_environment"
    remedy = "make xpu-env"


@dataclass(frozen=True)
class XpuEnvironment:
    """A folder that `make` made."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def ocloc(self) -> tuple[Path, dict[str, str]] | None:
        """(Intel's offline compiler, the environment variables that it needs), or None where neither Debian nor the system has one."""
        unpacked = self.folder / "debian" / "usr"
        if (unpacked / "bin" / "ocloc").exists():
            libraries = (unpacked / "lib" / "x86_64-linux-gnu", unpacked / "lib" / "llvm-14" / "lib")
            return unpacked / "bin" / "ocloc", {"LD_LIBRARY_PATH": ":".join(map(str, libraries))}
        found = shutil.which("ocloc")
        return (Path(found), {}) if found else None


def find_environment() -> XpuEnvironment | None:
    """KVBRIDGE_XPU_ENV where that is set, else .venv-xpu beside the project; None where it is not there or was made by an older version."""
    folder = Path(os.environ.get("KVBRIDGE_XPU_ENV") or ROOT / ".venv-xpu")
    stamp = folder / ".ready"
    return XpuEnvironment(folder) if stamp.is_file() and stamp.read_text().strip() == STAMP else None


def need_environment() -> XpuEnvironment:
    """Raises EnvironmentMissing."""
    found = find_environment()
    if found is None:
        raise EnvironmentMissing("the emulated XPU needs Intel's Triton and OpenCL runtime, whose environment (.venv-xpu) is not there")
    return found


class SourceMissing(DeviceError):
    """Something that the environment is made of could not be had."""

    clause = "xpu_source"
    remedy = "check the network and the package index, then run make xpu-env again"


INSTALL_SECONDS = 3600
"""For one of the packages, over a slow network."""
WITHOUT_OCLOC = "install ocloc (Intel's compute runtime has it), or make the environment without the native report: --without-ocloc"


def _run(what: str, *command: str | Path, cwd: Path | None = None, remedy: str = SourceMissing.remedy) -> None:
    """Raises SourceMissing, which says `what` was wanted and the last of what the command said."""
    try:
        subprocess.run([str(part) for part in command], check=True, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (subprocess.SubprocessError, OSError) as error:
        said = " ".join((getattr(error, "stderr", "") or str(error)).split())[-600:]
        raise SourceMissing(f"{what} cannot be had, {Path(command[0]).name} said: {said}", remedy=remedy) from None


def _need_ocloc(folder: Path) -> None:
    """Debian's offline compiler, or else the system's. Raises SourceMissing where there is neither."""
    try:
        _install_ocloc(folder)
    except SourceMissing:
        if not shutil.which("ocloc"):
            raise


def _install_ocloc(folder: Path) -> None:
    """Fetches Debian's packages with apt's ordinary client, whose state is kept in a folder of its own, and unpacks them.

    Raises SourceMissing.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise SourceMissing("Intel's offline compiler is not here, nor an apt-get to fetch it with", remedy=WITHOUT_OCLOC)
    target = folder / "debian"
    target.mkdir(parents=True, exist_ok=True)
    libraries = target / "usr" / "lib" / "x86_64-linux-gnu"
    with tempfile.TemporaryDirectory(prefix="kvbridge-apt-") as state:
        apt = Path(state)
        for part in ("lists/partial", "cache/archives/partial", "debs"):
            (apt / part).mkdir(parents=True)
        options = [f"Dir::State::Lists={apt}/lists", f"Dir::Cache={apt}/cache", "Debug::NoLocking=1", "APT::Sandbox::User=root"]
        client = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]

        def run(*command: str | Path) -> None:
            wanted = "Intel's offline compiler (Debian's intel-opencl-icd)"
            _run(wanted, *command, cwd=apt / "debs", remedy=f"check the network and apt's sources, or {WITHOUT_OCLOC}")

        def unpack(*packages: str) -> None:
            run(*client, "download", *packages)
            for package in sorted((apt / "debs").glob("*.deb")):
                run("dpkg", "-x", package, target)

        run(*client, "update")
        unpack(*_DEBIAN)
        (libraries / "libiga64.so").symlink_to("libiga64.so.1")  # the name that the disassembler asks for
        environment = {**os.environ, "LD_LIBRARY_PATH": f"{libraries}:{target}/usr/lib/llvm-14/lib"}
        needed = subprocess.run(["ldd", *map(str, libraries.glob("*.so*"))], env=environment, capture_output=True, text=True).stdout
        if "not found" in needed:
            unpack(*_DEBIAN_MORE)


def make(folder: Path, *, native: bool = True) -> XpuEnvironment:
    """Makes the environment, replacing what is there; native: with the offline compiler. Raises SourceMissing with what failed."""
    shutil.rmtree(folder, ignore_errors=True)
    _run("a virtual environment", sys.executable, "-m", "venv", "--without-pip", folder)
    made = XpuEnvironment(folder.resolve())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", made.python)
    _run("Intel's Triton and OpenCL runtime", *pip, "install", "--quiet", "--no-deps", "--no-compile", *PINS)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = made.folder / "lib" / version / "site-packages"
    for name in _NOT_NEEDED:
        shutil.rmtree(packages / name, ignore_errors=True)
    (made.folder / "lib" / "icx-lto.so").unlink(missing_ok=True)
    # After this environment's own packages, so that Intel's triton comes first.
    (packages / "zz_kvbridge.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    if native:
        _need_ocloc(made.folder)
    (made.folder / ".ready").write_text(STAMP + "\n")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="makes the environment of the emulated XPU")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv-xpu")
    parser.add_argument("--without-ocloc", action="store_true", help="leave Intel's offline compiler out, and so the native report")
    options = parser.parse_args()
    try:
        made = make(options.folder, native=not options.without_ocloc)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 1
    compiler = made.ocloc()
    print(f"{made.folder}: Intel's Triton and OpenCL runtime; offline compiler: {compiler[0] if compiler else 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
