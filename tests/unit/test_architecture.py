"""Who may know whom. `bridge` imports no vendor's package and no engine outside the rooms made for them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENDORS = {"triton", "nixl", "nixl_cu12", "nixl_cu13", "ucxx", "ucp", "intel_extension_for_pytorch", "vllm", "sglang", "numba", "cupy"}
ROOMS = {ROOT / "bridge" / "transfer", ROOT / "bridge" / "vllm"}
MODULES = sorted((ROOT / "bridge").rglob("*.py"))


def imported(path):
    """Top-level names of everything that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def attributes(path):
    """Dotted names such as torch.cuda."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def test_there_is_something_to_check():
    assert len(MODULES) > 30


@pytest.mark.parametrize("path", [path for path in MODULES if not ROOMS & set(path.parents)], ids=lambda path: str(path.relative_to(ROOT)))
def test_bridge_knows_no_vendor(path):
    names = set(imported(path))
    assert not {name.split(".")[0] for name in names} & (VENDORS | {"backends"})
    assert not {name for name in names if name.startswith(("torch.cuda", "torch.xpu"))}
    assert not {"torch.cuda", "torch.xpu"} & set(attributes(path))


def test_vendor_imports_would_be_found(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    import triton.language\n    from vllm import LLM\n    return torch.cuda\n")
    assert {"triton.language", "vllm"} <= set(imported(bad))
    assert "torch.cuda" in set(attributes(bad))


@pytest.mark.parametrize(("module", "absent"), [("bridge.wire", "torch"), ("bridge.codecs", "torch"), ("bridge.cli.main", "torch")])
def test_importing_does_not_import(module, absent):
    code = f"import sys, {module}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


FORBIDDEN_CALLS = {"eval", "exec"}


@pytest.mark.parametrize("path", MODULES + sorted((ROOT / "backends").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_product_code_has_no_assert_and_runs_nothing_that_it_receives(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: a typed error is wanted"
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            assert name not in FORBIDDEN_CALLS or (name == "eval" and isinstance(node.func, ast.Attribute)), f"line {node.lineno}: {name}"
            assert name != "recv_pyobj"
    assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & {name.split(".")[0] for name in imported(path)}
