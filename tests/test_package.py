"""The package as a whole: registration, the compiled library, what the compiler made of the kernels."""

import contextlib
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT, skip_unless_free
from hypothesis import given
from hypothesis import strategies as st

import dsa_ext
from dsa_ext import _native, ops
from dsa_ext.ops import _library

REGISTERS_PER_SM = 65536

needs_library = pytest.mark.skipif(_native.library is None, reason=f"no kernels: {_native.missing_reason}")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> str:
    """A program of the binary utilities or of the CUDA toolkit."""
    folders = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    folders.append(f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin")
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_operators_are_registered() -> None:
    for op in ops.OPERATORS:
        overload = getattr(torch.ops.dsa, op).default
        # What is made of other operators has one implementation for all devices, and no reference.
        has_reference = hasattr(ops.OPERATORS[op], "reference")
        devices = ("CPU", "CUDA", "Meta") if has_reference else ("CompositeExplicitAutograd",)
        for key in (*devices, "Autograd"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key), (op, key)


def test_build_info() -> None:
    info = dsa_ext.build_info()
    assert info["torch"] == torch.__version__
    assert ("unavailable" in info["kernels"]) == (_native.library is None)
    printed = run(sys.executable, "-m", "dsa_ext")
    assert all(name in printed and value in printed for name, value in info.items())


@pytest.mark.parametrize(("library", "reason"), [(None, "was not built"), (b"not a library", "did not load: ")])
def test_import_without_kernels(tmp_path: Path, library: bytes | None, reason: str) -> None:
    shutil.copytree(ROOT / "dsa_ext", tmp_path / "dsa_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if library is not None:
        (tmp_path / "dsa_ext/_C.abi3.so").write_bytes(library)
    script = """
import torch, dsa_ext
q, kv, indices = torch.randn(1, 2, 4, 576), torch.randn(1, 8, 1, 576), torch.zeros(1, 2, 1, 3, dtype=torch.int32)
assert dsa_ext.sparse_mla(q, kv, indices).isfinite().all()
try:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    torch.ops.dsa.sparse_mla_fwd.default.redispatch(keys, q, kv, indices)
except RuntimeError as error:
    print(error)
print(dsa_ext.build_info()["kernels"], dsa_ext.__file__)
"""
    printed = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert str(tmp_path) in printed, "the copy without the library was not the one imported"
    assert "dsa::sparse_mla_fwd: dsa_ext is installed without its CUDA kernels, because _C.abi3.so" in printed
    assert printed.count(reason) == 2


@needs_library
def test_error_of_an_operator_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.library._scoped_library("dsa", "FRAGMENT") as library:
        monkeypatch.setattr(_library, "library", library)
        library.define("without_a_kernel(Tensor x) -> Tensor")
        _library.explain_missing_cuda("without_a_kernel")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        with pytest.raises(
            RuntimeError, match=r"^dsa::without_a_kernel: _C\.abi3\.so has no CUDA kernel for this operator"
        ):
            torch.ops.dsa.without_a_kernel.default.redispatch(keys, torch.zeros(1))


@needs_library
def test_library_depends_on_the_stable_abi_alone() -> None:
    needed = run(tool("readelf"), "-d", _native.library or "")
    # libtorch brings libtorch_cuda, and with it the current stream, into scope on CUDA builds.
    assert "[libtorch.so]" in needed
    for library in ("libcuda", "libcudart", "libpython", "libtorch_python", "libtorch_cuda", "libc10_cuda"):
        assert library not in needed
    symbols = run(tool("readelf"), "--dyn-syms", "-W", _native.library or "")
    undefined = {
        line.split()[-1].split("@")[0] for line in symbols.splitlines() if " UND " in line and line.split()[7:]
    }
    assert any(name.startswith("aoti_torch_") for name in undefined)
    assert not [name for name in undefined if re.match(r"_?Py[A-Z_]|cu[A-Z]|cuda[A-Z]|_ZNK?\d*(2at|3c10)", name)]
    stream = next(line for line in symbols.splitlines() if "aoti_torch_get_current_cuda_stream" in line)
    assert " WEAK " in stream


@pytest.mark.parametrize(("mode", "tag"), [("1", r"cp310-abi3-linux_\w+"), ("0", "py3-none-any")])
def test_wheel_tag(mode: str, tag: str, tmp_path: Path) -> None:
    environment = {**os.environ, "DSA_EXT_CUDA": mode}
    command = [sys.executable, "setup.py", "--name"]
    can_build = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if can_build.returncode != 0:
        pytest.skip(can_build.stderr.splitlines()[-1])
    build = ("build", "--build-base", tmp_path / "build", "bdist_wheel", "--dist-dir", tmp_path)
    run(sys.executable, "setup.py", "-q", *build, DSA_EXT_CUDA=mode)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"dsa_ext-{re.escape(dsa_ext.__version__)}-{tag}\.whl", wheel.name)
    contents = run(sys.executable, "-m", "zipfile", "-l", wheel)
    assert ("_C.abi3.so" in contents) == (mode == "1")
    assert "dsa_ext/py.typed" in contents


@pytest.mark.parametrize(("free", "skipped"), [(11.9e9, True), (12.1e9, False)])
def test_large_tests_ask_for_free_memory(free: float, skipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80e9))
    reason = r"needs 12 GB of GPU memory, 11\.9 GB are free"
    with pytest.raises(pytest.skip.Exception, match=reason) if skipped else contextlib.nullcontext():
        skip_unless_free(12)


def test_versions_are_pinned_once() -> None:
    pinned = set(re.findall(r"^[\w-]+==[\w.]+$", (ROOT / "requirements-dev.txt").read_text(), flags=re.MULTILINE))
    hooks = set(re.findall(r"[\w-]+==[\w.]+", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert {hook.split("==")[0] for hook in hooks} == {"ruff", "mypy", "clang-format", "torch"}
    assert hooks <= pinned
    cutlass = re.search(r"nvidia-cutlass==[\w.]+", (ROOT / "requirements-build.txt").read_text())
    assert cutlass is not None
    for name in ("setup.py", "third_party/README.md"):
        assert cutlass.group() in (ROOT / name).read_text()


def test_bad_build_mode() -> None:
    environment = {**os.environ, "DSA_EXT_CUDA": "yes"}
    command = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode != 0
    assert "DSA_EXT_CUDA must be auto, 1 or 0, got 'yes'" in done.stderr


class Kernels(NamedTuple):
    """What one source file compiles to."""

    main: str  # pattern of the main kernels' names
    instances: int  # of them
    threads: int  # most of one CTA
    instructions: tuple[str, ...]  # that every main kernel claims to be made of
    others: tuple[str, ...] = ()  # the other kernels' names
    spilled: int = 0  # most bytes that a kernel may spill


#: Tensor cores, TMA in and out, cp.async, mbarriers, moved registers.
MLA = ("HGMMA", "UTMALDG", "UTMASTG", "LDGSTS", "SYNCS", "USETMAXREG")
SOURCES = [
    "sparse_mla_fwd/launch",
    "sparse_mla_bwd/launch",
    "attn_dist/launch",
    "indexer_scores/launch",
    "indexer_logits/launch_fp8",
    "indexer_logits/launch_bf16",
    "topk_select/launch",
    "indexer_loss/launch",
    "indexer_bwd/launch",
    "block_select/launch",
    "block_sparse_attn_fwd/launch",
    "block_sparse_attn_bwd/launch",
    "coarse_attn_fwd/launch",
    "gated_fusion/launch",
    "act_quant/launch",
    "fp8_gemm/launch",
    "mhc_pre_fwd/launch",
    "mhc_pre_bwd/launch",
    "mhc_post/launch",
]


def of_streams(*kernels: str) -> tuple[str, ...]:
    """Names of the instances for 2 and for 4 streams."""
    return tuple(f"{kernel}_kernelILi{streams}E" for kernel in kernels for streams in (2, 4))


def kernels_of(source: str, host_functions: ModuleType) -> Kernels:
    fwd, bwd, listed, logits, select, gradients = (
        getattr(host_functions, op)
        for op in ("sparse_mla_fwd", "sparse_mla_bwd", "listed_keys", "indexer_logits", "topk_select", "indexer_bwd")
    )
    logits_shapes, scoring = 4 * 2, ("UTMALDG", "SYNCS", "USETMAXREG")  # of heads and of columns
    select_shapes = 2 * (2 + 2)  # of dtypes, and of CTAs that hold their runs and that filter them
    listing = ("HGMMA", "UTMALDG", "LDGSTS", "SYNCS", "USETMAXREG")
    bwd_others = ("combine_kernel", "sink_kernel", "list_slots_kernel")
    gradients_others = ("merge_lists_kernel", "list_ranges_kernel", "list_slots_kernel")
    return {
        "sparse_mla_fwd/launch": Kernels(
            "sparse_mla_fwd_kernel", len(fwd.configs), fwd.threads, MLA, ("combine_kernel",)
        ),
        # Of columns and of gates; forward and backward.
        "gated_fusion/launch": Kernels(
            "gated_fusion_[fb]wd_kernel", 2 * 2 * 2, 256, ("LDG.E.128", "MUFU.EX2", "STG.E.128")
        ),
        # One that adds to sums, and one that stores rows.
        "sparse_mla_bwd/launch": Kernels(
            "sparse_mla_bwd_kernel", 2 * len(bwd.configs), bwd.threads, (*MLA, "REDG"), bwd_others
        ),
        # Of columns and of heads, as many as the instance has or fewer.
        "attn_dist/launch": Kernels("listed_keys_kernel.*Attention", 2 * 4 * 2, listed.threads(576, 64), listing),
        "indexer_scores/launch": Kernels("listed_keys_kernel.*Indexer", 2 * 3 * 2, listed.threads(128, 64), listing),
        "indexer_logits/launch_fp8": Kernels(
            "indexer_logits_kernel.*e4m3", logits_shapes, logits.threads, ("QGMMA", *scoring)
        ),
        "indexer_logits/launch_bf16": Kernels(
            "indexer_logits_kernel.*bfloat16",
            logits_shapes,
            logits.threads,
            ("HGMMA", *scoring),
        ),
        "topk_select/launch": Kernels(
            "topk_select_kernel", select_shapes, select.threads, ("UBLKCP", "ATOMS", "REDUX")
        ),
        "indexer_loss/launch": Kernels("indexer_loss_kernel", 1, 256, ("MUFU", "SHFL")),
        # Of dtypes, and of 1 to 32 warps a row.
        "block_select/launch": Kernels("block_select_kernel", 2 * 6, 1024, ("FMNMX", "SHFL", "VOTE", "REDUX")),
        # Of columns.
        "block_sparse_attn_fwd/launch": Kernels(
            "block_sparse_attn_fwd_kernel", 2, 512, ("HGMMA", *scoring), ("combine_kernelILi64", "combine_kernelILi128")
        ),
        "block_sparse_attn_bwd/launch": Kernels(
            "(query|key)_gradients_kernel", 2 * 2, 384, ("HGMMA", *scoring), ("transpose_kernel",)
        ),
        # Of dtypes.
        "act_quant/launch": Kernels("act_quant_kernel", 2, 3 * 512, ("LDG.E.128", "F2FP.SATFINITE.E4M3", "SHFL")),
        # Of numbers of rows.
        "fp8_gemm/launch": Kernels("fp8_gemm_kernel", 4, 320, ("QGMMA", "UTMALDG", "LDGSTS", "STSM", "SYNCS")),
        # Of 2 and of 4 streams; of columns of a CTA. phi fills the registers: a few words of what is read once a tile
        # are elsewhere.
        "mhc_pre_fwd/launch": Kernels(
            "mhc_pre_fwd_kernel", 3 + 4, 512, ("HMMA", "LDSM", "UTMALDG", "USETMAXREG", "UCGABAR_ARV"), spilled=32
        ),
        "mhc_pre_bwd/launch": Kernels(
            "columns_kernel",
            2,
            640,
            ("HMMA", "LDSM", "UTMALDG", "UTMASTG", "USETMAXREG"),
            of_streams("gates", "reduce"),
            spilled=8,
        ),
        "mhc_post/launch": Kernels(
            "mhc_post_[fb]wd_kernel", 2 * 2, 2 * 256, ("LDG.E.128", "STG.E.128"), of_streams("mixing", "mixing_bwd")
        ),
        "coarse_attn_fwd/launch": Kernels("coarse_attn_fwd_kernel", 2, 512, ("HGMMA", *scoring)),
        # Of columns and of heads; one that adds to sums, and one that stores rows.
        "indexer_bwd/launch": Kernels("indexer_bwd_kernel", 2 * 4 * 2, gradients.threads, MLA, gradients_others),
    }[source]


@pytest.mark.parametrize("source", SOURCES)
def test_compiler_report(source: str, host_functions: ModuleType) -> None:
    """ptxas: no more spilled than known, no tensor-core instruction serialised, registers for a whole CTA of each."""
    reports = [*(ROOT / "build/obj/csrc/ops").glob(f"*/{source}.o.ptxas")]
    if not reports:
        pytest.skip("the kernels were not compiled in this checkout")
    text = reports[0].read_text()
    assert "Potential Performance Loss" not in text
    reported = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        text,
        flags=re.DOTALL,
    )
    # The pattern must not skip a kernel whose report looks different.
    assert len(reported) == text.count("Compiling entry function")
    kernels = kernels_of(source, host_functions)
    names = [name for name, *_ in reported]
    assert sum(bool(re.search(kernels.main, name)) for name in names) == kernels.instances
    assert len(names) == kernels.instances + len(kernels.others)
    for other in kernels.others:
        assert sum(other in name for name in names) == 1
    for name, *numbers in reported:
        _, stores, loads, registers = map(int, numbers)
        assert max(stores, loads) <= kernels.spilled, name
        if re.search(kernels.main, name):
            assert registers * kernels.threads <= REGISTERS_PER_SM, name


@functools.cache
def machine_code() -> list[str]:
    """The library's kernels, disassembled: name and instructions of each."""
    folders = [str(Path(tool(name)).parent) for name in ("cuobjdump", "nvdisasm")]
    path = os.pathsep.join([*folders, os.environ["PATH"]])
    disassembly = run(tool("cuobjdump"), "-sass", _native.library or "", PATH=path)
    return disassembly.split("Function : ")[1:]


@needs_library
def test_kernels_contain_the_instructions_they_claim(host_functions: ModuleType) -> None:
    for source in SOURCES:
        kernels = kernels_of(source, host_functions)
        found = [function for function in machine_code() if re.search(kernels.main, function.split("\n", 1)[0])]
        assert len(found) == kernels.instances
        for kernel in found:
            for instruction in kernels.instructions:
                assert re.search(rf"\b{instruction}\b", kernel), (kernel.split("\n", 1)[0], instruction)


@needs_library
def test_queries_stay_in_registers() -> None:
    """What all products of a loop over blocks read: ptxas 13.0 gives it away when it thinks nobody looks."""
    name = re.compile("block_sparse_attn_fwd_kernel|coarse_attn_fwd_kernel|query_gradients_kernel")
    kernels = [kernel for kernel in machine_code() if name.search(kernel.split("\n", 1)[0])]
    assert len(kernels) == 3 * 2
    for kernel in kernels:
        lines = kernel.splitlines()
        products = [i for i, line in enumerate(lines) if "HGMMA" in line]
        scores = [line for line in (lines[i] for i in products) if "HGMMA.64x64x16" in line and "tnspB" not in line]
        firsts = [int(re.findall(r"R(\d+), gdesc", line)[0]) for line in scores]
        queries = {first + i for first in firsts for i in range(4)}
        assert len(queries) in (16, 32, 64)  # with dout, twice as many
        for line in lines[products[0] : products[-1]]:
            written = re.search(r"\*/\s+(?:@!?U?P\d+ )?(?!ST|HGMMA)[A-Z0-9_.]+ R(\d+)", line)
            assert not written or int(written[1]) not in queries, line


@given(items=st.integers(1, 5000), slots=st.integers(1, 5000), num_sms=st.integers(1, 140))
def test_pieces(host_functions: ModuleType, items: int, slots: int, num_sms: int) -> None:
    """Every unit of every list once, by one worker or by all of a CTA; of a worker's pieces two at most are parts: one
    begins a list, one does not."""
    seen: dict[int, dict[tuple[int, int], list[int]]] = {}
    for worker, pieces in enumerate(host_functions.block_sparse_attn_fwd.pieces(items, slots, num_sms)):
        parts = [begin == 0 for _, begin, end, units in pieces if end - begin < units]
        assert len(parts) == len(set(parts))
        for item, begin, end, units in pieces:
            assert 0 <= begin < end <= units <= slots
            seen.setdefault(item, {}).setdefault((begin, end), []).append(worker)
    assert sorted(seen) == list(range(items))
    for item in seen:
        ends = [0]
        for (begin, end), workers in sorted(seen[item].items()):
            assert begin == ends[-1]
            ends.append(end)
            if (begin, end) != (0, units) or len(workers) > 1:
                assert workers == list(range(workers[0], 3 * num_sms, num_sms))
        assert ends[-1] == units


def test_a_config_for_every_shape(host_functions: ModuleType) -> None:
    shapes = itertools.product([(576, 512), (512, 512)], [64, 32, 16])
    assert sorted(host_functions.sparse_mla_fwd.configs) == sorted((*dims, heads) for dims, heads in shapes)


@given(items=st.integers(0, 2**40), topk=st.integers(1, 2**20), num_sms=st.integers(1, 200))
def test_plan_splits(host_functions: ModuleType, items: int, topk: int, num_sms: int) -> None:
    fwd = host_functions.sparse_mla_fwd
    splits = fwd.plan_splits(items, topk, num_sms)
    tiles = -(-topk // fwd.block_k)
    assert 1 <= splits <= fwd.max_splits
    assert splits <= tiles, "a part without keys"
    if splits > 1:
        assert splits * items <= num_sms, "the parts must run at once"


def test_plan_splits_fills_the_chip(host_functions: ModuleType) -> None:
    plan = host_functions.sparse_mla_fwd.plan_splits
    assert plan(1, 2048, 132) > 4
    assert plan(4096, 2048, 132) == 1
    assert plan(1, 64, 132) == 1


@given(items=st.integers(0, 2**40), topk=st.integers(1, 2**20), num_sms=st.integers(1, 200))
def test_plan_items(host_functions: ModuleType, items: int, topk: int, num_sms: int) -> None:
    whole, parts = host_functions.sparse_mla_bwd.plan_items(items, topk, num_sms)
    split = items - whole
    assert parts >= 1
    if parts == 1:
        assert split == 0
    else:
        assert 0 < split == items % num_sms, "only what the last wave would leave idle is split"
        assert split * parts <= num_sms, "the parts must run at once"
        assert parts * host_functions.sparse_mla_fwd.block_k <= topk, "a part without keys"


@given(items=st.integers(1, 2**10), topk=st.integers(1, 2**20), num_sms=st.integers(1, 200))
def test_queries_at_once(host_functions: ModuleType, items: int, topk: int, num_sms: int) -> None:
    queries = host_functions.sparse_mla_bwd.queries_at_once(items, topk, 576, num_sms)
    assert queries == 1 or queries * items * topk * 576 * 2 <= 2**30


@given(groups=st.integers(1, 2**20), size=st.integers(0, 2**40), num_sms=st.integers(1, 200))
def test_groups_at_once(host_functions: ModuleType, groups: int, size: int, num_sms: int) -> None:
    at_once = host_functions.indexer_bwd.groups_at_once(groups, size, 2**30, num_sms)
    assert 1 <= at_once <= groups
    assert at_once == 1 or at_once * size <= 2**30
    assert at_once == groups or at_once < num_sms or at_once % num_sms == 0


def test_queries_at_once_fill_waves(host_functions: ModuleType) -> None:
    queries_at_once = host_functions.sparse_mla_bwd.queries_at_once
    assert queries_at_once(1, 2048, 576, 132) == 3 * 132
    assert queries_at_once(2, 2048, 576, 132) == 3 * 132 // 2


def test_plan_items_fills_the_chip(host_functions: ModuleType) -> None:
    plan = host_functions.sparse_mla_bwd.plan_items
    assert plan(4096, 2048, 132) == (4092, 16)
    assert plan(132 * 7, 2048, 132) == (132 * 7, 1)
    assert plan(1, 64, 132) == (1, 1)


@given(rows=st.integers(0, 2**31 - 1), columns=st.integers(0, 2**31 - 1), num_sms=st.integers(1, 200))
def test_plan_ctas(host_functions: ModuleType, rows: int, columns: int, num_sms: int) -> None:
    ctas = host_functions.topk_select.plan_ctas(rows, columns, num_sms)
    assert ctas in (1, 2, 4, 8)
    if ctas > 1:
        assert rows * ctas <= num_sms, "every CTA must have an SM"


def test_plan_ctas_fills_the_chip(host_functions: ModuleType) -> None:
    plan = host_functions.topk_select.plan_ctas
    assert plan(1, 2**20, 132) == 8
    assert plan(1, 131072, 132) == 4
    assert plan(32, 32768, 132) == 4, "runs that a CTA can hold"
    assert plan(64, 32768, 132) == 1
    assert plan(4096, 131072, 132) == 1
    assert plan(1, 1000, 132) == 1


@given(queries=st.integers(0, 2**20), keys=st.integers(0, 2**20))
def test_scored_at_once(host_functions: ModuleType, queries: int, keys: int) -> None:
    count = host_functions.indexer_topk.queries_at_once(queries, keys)
    assert min(1, queries) <= count <= queries
    assert count <= 1 or count * keys * 4 <= 2**28
    assert count < 64 or count == queries or count % 64 == 0
