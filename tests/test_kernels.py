"""What the compiler made of the kernels: its report, and the instructions in the library."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from commands import needs_library, run, tool
from conftest import ROOT

from dsa_ext import _native

REGISTERS_PER_SM = 65536


class Kernels(NamedTuple):
    """The kernels of one source file."""

    main: str  # pattern of the main kernels' names
    instances: int  # number of main kernels
    threads: int | Callable[[str], int]  # most threads of a CTA; or a function of a kernel's name
    instructions: tuple[str, ...]  # every main kernel contains them
    others: tuple[str, ...] = ()  # the other kernels' names
    spilled: int = 0  # largest number of bytes that a kernel may spill


#: Tensor cores, TMA loads and stores, cp.async, mbarriers, setmaxnreg.
MLA = ("HGMMA", "UTMALDG", "UTMASTG", "LDGSTS", "SYNCS", "USETMAXREG")
SOURCES = [
    "sparse_mla_fwd/launch",
    "sparse_mla_fwd/launch_paged",
    "sparse_mla_fwd/launch_merging",
    "sparse_mla_bwd/launch",
    "sparse_mla_bwd/launch_pairs",
    "sparse_mla_bwd/sort_lists",
    "merged_lists/launch",
    "list_lengths/launch",
    "attn_dist/launch",
    "attn_dist/launch_merging",
    "sparse_mha/mask",
    "sparse_mha_fwd/launch",
    "sparse_mha_bwd/launch",
    "sparse_mha_dist/launch",
    "sparse_mla_decode/launch_wide",
    "sparse_mla_decode/launch_narrow",
    "pack_kv_fp8/launch",
    "write_rotated/launch",
    "indexer_scores/launch",
    "indexer_logits/launch_fp8",
    "indexer_logits/launch_bf16",
    "indexer_logits/launch_above_fp8",
    "indexer_logits/launch_above_bf16",
    "indexer_topk/launch",
    "indexer_logits_paged/launch_fp8",
    "indexer_logits_paged/launch_bf16",
    "topk_select/launch_ids",
    "topk_select/launch_slots",
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


def instance_names(*kernels: str) -> tuple[str, ...]:
    """Names of the instances for 2 and for 4 streams."""
    return tuple(f"{kernel}_kernelILi{streams}E" for kernel in kernels for streams in (2, 4))


def kernels_of(source: str, host_functions: ModuleType) -> Kernels:
    fwd, bwd, listed, logits, paged, select, gradients = (
        getattr(host_functions, op)
        for op in (
            "sparse_mla_fwd",
            "sparse_mla_bwd",
            "listed_keys",
            "indexer_logits",
            "indexer_logits_paged",
            "topk_select",
            "indexer_bwd",
        )
    )
    # For 64 and 32, 16, and 8 heads: products of 64 rows, of 128 rows, and several of 128 rows; x columns.
    paged_shapes = (2 * 3 + 2 + 1) * 2

    def paged_threads(name: str) -> int:
        shape = re.search(r"_tELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E", name)
        assert shape
        return int(paged.threads(*map(int, shape.groups())))

    logits_shapes, scoring = 4 * 2, ("UTMALDG", "SYNCS", "USETMAXREG")  # heads x columns
    select_shapes = 2 * (2 + 3) + 1  # dtypes x shapes of CTAs that hold their part of a row or filter it; larger fp32
    selection = ("ATOMS", "REDUX")
    unpacking = ("F2FP.F16.E4M3.UNPACK_B", "HMUL2.BF16_V2")
    listing = ("HGMMA", "UTMALDG", "LDGSTS", "SYNCS", "USETMAXREG")
    bwd_others = ("combine_kernelILb0", "combine_kernelILb1", "sink_kernel", "list_slots_kernel")
    gradients_others = ("merge_lists_kernel", "list_ranges_kernel", "list_slots_kernel")
    return {
        # Without and with the largest scores.
        "sparse_mla_fwd/launch": Kernels(
            "sparse_mla_fwd_kernel.*12KernelParams",
            2 * len(fwd.configs),
            fwd.threads,
            (*listing, "STG.E.128"),
            ("combine_kernelILb0", "combine_kernelILb1"),
        ),
        # Keys in the pages of a cache.
        "sparse_mla_fwd/launch_paged": Kernels(
            "sparse_mla_fwd_kernel.*11PagedParams", len(fwd.configs), fwd.threads, (*listing, "STG.E.128", "ACQBULK")
        ),
        # Runs of queries with merged lists, whose value warpgroups spill what they need once an item, and the other
        # queries of such a call.
        "sparse_mla_fwd/launch_merging": Kernels(
            "sparse_mla_fwd_kernel.*12MergedParams", 2 * 2, fwd.threads, (*listing, "STG.E.128"), spilled=100
        ),
        # Columns x gate dtypes; forward and backward.
        "gated_fusion/launch": Kernels(
            "gated_fusion_[fb]wd_kernel", 2 * 2 * 2, 256, ("LDG.E.128", "MUFU.EX2", "STG.E.128")
        ),
        # One kernel adds to sums, another stores rows; both without and with sums of P. With merged lists only the
        # first.
        "sparse_mla_bwd/launch": Kernels(
            "sparse_mla_bwd_(merged_)?kernel",
            sum(1 if merged else 4 for *_, merged in bwd.configs),
            bwd.threads,
            (*MLA, "REDG"),
            bwd_others,
        ),
        # Columns x adding to sums or storing rows x without and with sums of P.
        "sparse_mla_bwd/launch_pairs": Kernels(
            "sparse_mla_bwd_pair_kernel",
            2 * 2 * 2,
            4 * 128,
            ("HGMMA", "UTMALDG", "UBLKCP", "LDGSTS", "SYNCS", "STSM", "USETMAXREG", "REDG"),
            ("dq_kernelILi512", "dq_kernelILi576"),
        ),
        # One instance per number of slots: 512 to 8192.
        "sparse_mla_bwd/sort_lists": Kernels("sort_lists_kernel", 5, 256, ("BAR.RED.AND", "STS.U16")),
        # One instance per number of queries.
        "merged_lists/launch": Kernels(
            "merge_lists_kernelILi",
            3 * 2,
            256,
            ("ATOMS.OR", "POPC"),
            ("drop_unfit_runs_kernel", "list_items_kernel"),
            spilled=20,  # with runs of two queries
        ),
        "list_lengths/launch": Kernels("list_lengths_kernel", 1, 256, ("REDUX.MAX", "LDG", "ACQBULK")),
        "sparse_mha/mask": Kernels("sparse_mha.*mask_kernel", 1, 512, ("STS.U8", "LDS.128", "VOTE.ANY")),
        "sparse_mha_fwd/launch": Kernels(
            "sparse_mha_fwd_kernel", 1, 384, ("HGMMA", "UTMALDG", "LDGSTS", "SYNCS", "R2P", "USETMAXREG")
        ),
        # Of keys, and of queries.
        "sparse_mha_bwd/launch": Kernels(
            "sparse_mha_bwd.*(key|query)_gradients_kernel",
            2,
            384,
            ("HGMMA", "UTMALDG", "SYNCS", "USETMAXREG", "ACQBULK"),
            ("sparse_mha_bwd14prepare_kernel", "finish_kernel"),
        ),
        "sparse_mha_dist/launch": Kernels(
            "sparse_mha_dist_kernel", 1, 384, ("HGMMA", "UTMALDG", "SYNCS", "USETMAXREG"), ("gather_kernel",)
        ),
        # Columns x CTAs alone or in pairs.
        "sparse_mla_decode/launch_wide": Kernels(
            "sparse_mla_decode_wide_kernel",
            2 * 2,
            384,
            ("HGMMA", "LDGSTS", "STSM", "SYNCS", "ACQBULK", *unpacking),
            spilled=36,
        ),
        "sparse_mla_decode/launch_narrow": Kernels(
            "sparse_mla_decode_narrow_kernel",
            2 * 2,
            384,
            ("HGMMA", "LDG.E.NA.128.CONSTANT", "STS.128", "STSM", "SYNCS", "ACQBULK", *unpacking),
        ),
        # One instance per number of columns.
        "pack_kv_fp8/launch": Kernels(
            "pack_kv_fp8_kernel", 2, 8 * 256, ("LDG.E.128", "F2FP.SATFINITE.E4M3", "SHFL", "ACQBULK")
        ),
        "write_rotated/launch": Kernels("write_rotated_kernel", 1, 8 * 256, ("LDG.E.128", "PRMT")),
        # Columns x heads; heads that fill the instance, or fewer.
        "attn_dist/launch": Kernels("listed_keys_kernel.*AttentionE+Lb0E", 2 * 4 * 2, listed.threads(576, 64), listing),
        # Columns x heads: runs of queries with merged lists, and the other queries of such a call.
        "attn_dist/launch_merging": Kernels(
            "attn_dist_runs_kernel|listed_keys_kernel.*AttentionE+Lb1E",
            2 * 2 + 2 * 2,
            listed.threads(576, 64),
            ("HGMMA", "LDGSTS", "UTMALDG", "SYNCS", "USETMAXREG", "MUFU.EX2"),
        ),
        "indexer_scores/launch": Kernels("listed_keys_kernel.*Indexer", 2 * 3 * 2, listed.threads(128, 64), listing),
        "indexer_logits/launch_fp8": Kernels(
            "indexer_logits_kernel.*e4m3.*Lb0E", logits_shapes, logits.threads, ("QGMMA", *scoring)
        ),
        "indexer_logits/launch_bf16": Kernels(
            "indexer_logits_kernel.*bfloat16.*Lb0E",
            logits_shapes,
            logits.threads,
            ("HGMMA", *scoring),
            spilled=8,  # with 64 columns and 16 heads
        ),
        # Not with 8 heads.
        "indexer_logits/launch_above_fp8": Kernels(
            "indexer_logits_kernel.*e4m3.*Lb1E", 3 * 2, logits.threads, ("QGMMA", *scoring, "VOTE", "ATOMG")
        ),
        "indexer_logits/launch_above_bf16": Kernels(
            "indexer_logits_kernel.*bfloat16.*Lb1E", 3 * 2, logits.threads, ("HGMMA", *scoring, "VOTE", "ATOMG")
        ),
        # topk up to 2048 and beyond, and rows beyond 128K keys.
        "indexer_topk/launch": Kernels(
            "select_candidates_kernel", 3, 512, ("ATOMS", "REDUX"), ("split_kernel", "bars_kernel"), spilled=8
        ),
        # Instances with several products a tile spill half of a 64-bit offset.
        "indexer_logits_paged/launch_fp8": Kernels(
            "indexer_logits_paged_kernel.*e4m3",
            paged_shapes,
            paged_threads,
            ("QGMMA", "UTMALDG", "UBLKCP", "SYNCS"),
            spilled=4,
        ),
        "indexer_logits_paged/launch_bf16": Kernels(
            "indexer_logits_paged_kernel.*bfloat16", paged_shapes, paged_threads, ("HGMMA", "UTMALDG", "SYNCS")
        ),
        # Results are ids, or slots of a cache.
        "topk_select/launch_ids": Kernels("topk_select_kernel.*Lb0EEEv", select_shapes, select.threads, selection),
        "topk_select/launch_slots": Kernels("topk_select_kernel.*Lb1EEEv", select_shapes, select.threads, selection),
        # Two that hold a row in registers, and one for longer rows.
        "indexer_loss/launch": Kernels("indexer_loss_kernel", 2 + 1, 1024, ("LDG.E.128", "MUFU", "SHFL", "STG.E.128")),
        # Dtypes x 1 to 32 warps per row.
        "block_select/launch": Kernels("block_select_kernel", 2 * 6, 1024, ("FMNMX", "SHFL", "VOTE", "REDUX")),
        # One instance per number of columns.
        "block_sparse_attn_fwd/launch": Kernels(
            "block_sparse_attn_fwd_kernel", 2, 512, ("HGMMA", *scoring), ("combine_kernelILi64", "combine_kernelILi128")
        ),
        "block_sparse_attn_bwd/launch": Kernels(
            "attn_bwd16gradients_kernel", 2, 384, ("HGMMA", *scoring), ("prepare_kernelILi64", "prepare_kernelILi128")
        ),
        # One instance per dtype.
        "act_quant/launch": Kernels("act_quant_kernel", 2, 3 * 512, ("LDG.E.128", "F2FP.SATFINITE.E4M3", "SHFL")),
        # One instance per number of rows.
        "fp8_gemm/launch": Kernels("fp8_gemm_kernel", 4, 320, ("QGMMA", "UTMALDG", "LDGSTS", "STSM", "SYNCS")),
        # Numbers of columns per CTA, for 2 and for 4 streams. With the most, a few words of warps without phi, which
        # are read once per tile, are spilled.
        "mhc_pre_fwd/launch": Kernels(
            "mhc_pre_fwd_kernel", 3 + 4, 512, ("HMMA", "LDSM", "UTMALDG", "USETMAXREG", "UCGABAR_ARV"), spilled=16
        ),
        "mhc_pre_bwd/launch": Kernels(
            "columns_kernel",
            2,
            512,
            ("HMMA", "LDSM", "UTMALDG", "UTMASTG", "USETMAXREG", "LDG.E.128.STRONG.GPU"),
            instance_names("reduce"),
            spilled=300,  # by warps that make gates, a few times a call
        ),
        "mhc_post/launch": Kernels(
            "mhc_post_[fb]wd_kernel", 2 * 2, 2 * 256, ("LDG.E.128", "STG.E.128"), instance_names("mixing", "mixing_bwd")
        ),
        "coarse_attn_fwd/launch": Kernels("coarse_attn_fwd_kernel", 2, 512, ("HGMMA", *scoring)),
        # Columns x heads; one kernel adds to sums, the other stores rows.
        "indexer_bwd/launch": Kernels("indexer_bwd_kernel", 2 * 4 * 2, gradients.threads, MLA, gradients_others),
    }[source]


@pytest.mark.parametrize("source", SOURCES)
def test_compiler_report(source: str, host_functions: ModuleType) -> None:
    """ptxas: no unknown spills, no serialized wgmma, and few enough registers for a whole CTA."""
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
            threads = kernels.threads(name) if callable(kernels.threads) else kernels.threads
            assert registers * threads <= REGISTERS_PER_SM, name


@functools.cache
def machine_code() -> list[str]:
    """The disassembled kernels of the library: name and instructions of each."""
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
def test_pairs_send_unpacked_keys() -> None:
    """Decoding with more than 64 heads: bulk copies to the other CTA of the cluster, and no other kernel has them."""
    for instance, sends in (("ELb1E", True), ("ELb0E", False)):
        name = re.compile("sparse_mla_decode_wide_kernel.*" + instance)
        kernels = [kernel for kernel in machine_code() if name.search(kernel.split("\n", 1)[0])]
        assert len(kernels) == 2
        for kernel in kernels:
            assert ("UBLKCP.S.S" in kernel) == sends
            assert ("UCGABAR_ARV" in kernel) == sends


@needs_library
def test_queries_stay_in_registers() -> None:
    """The registers of the query fragments are not written in the loop over blocks; ptxas 13.0 may reuse them."""
    name = re.compile("block_sparse_attn_fwd_kernel|coarse_attn_fwd_kernel")
    kernels = [kernel for kernel in machine_code() if name.search(kernel.split("\n", 1)[0])]
    assert len(kernels) == 2 * 2
    for kernel in kernels:
        lines = kernel.splitlines()
        products = [i for i, line in enumerate(lines) if "HGMMA" in line]
        scores = [line for line in (lines[i] for i in products) if "HGMMA.64x64x16" in line and "tnspB" not in line]
        firsts = [int(re.findall(r"R(\d+), gdesc", line)[0]) for line in scores]
        queries = {first + i for first in firsts for i in range(4)}
        assert len(queries) in (16, 32)
        for line in lines[products[0] : products[-1]]:
            written = re.search(r"\*/\s+(?:@!?U?P\d+ )?(?!ST|HGMMA)[A-Z0-9_.]+ R(\d+)", line)
            assert not written or int(written[1]) not in queries, line


#: How many arrivals kernels have during loads of shared memory that do not read what the arrival lets others overwrite.
READS_BESIDE_ARRIVALS = {
    "sparse_mla_fwd_kernel": 2,  # the visible keys of the tile after; an item's tiles, of which there are two in turn
    "12MergedParams": 1,  # an item's tiles, again
    "sparse_mla_decode_wide_kernel": 1,  # the numbers of a tile's keys, while P of the tile before is handed over
    "block_sparse_attn_fwd_kernelILi64": 1,  # Q, while the tile of the output before is freed
    "fp8_gemm_kernelILi8": 2,  # scales: their loads are issued before a product that the arrival waits for
}
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+([^;]*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/")


def arrivals_during_reads(kernel: str) -> list[str]:
    """Arrivals on barriers that do not wait for loads of shared memory before them, although others may overwrite what
    is read as soon as all have arrived. ptxas makes such code: a shuffle of the loaded value does not stop it, a fence
    in front of the arrival does. Of an instruction's 128 bits, bits 110 to 112 are the scoreboard that it sets when it
    is done (7: none), and bits 116 to 121 say which ones it waits for."""
    found, loading = [], set[int]()
    for text, upper_half in INSTRUCTION.findall(kernel):
        control = int(upper_half, 16) >> 110 - 64
        sets, waits_for = control & 7, control >> 116 - 110 & 63
        opcode = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
        loading = {scoreboard for scoreboard in loading if not waits_for >> scoreboard & 1}
        if opcode == "SYNCS.ARRIVE.TRANS64.A1T0" and loading:
            found.append(text)
        if opcode.startswith("LDS") and sets != 7:
            loading.add(sets)
        if opcode.startswith("MEMBAR") or (not text.startswith("@") and opcode in ("BRA", "EXIT", "RET.REL.NODEC")):
            loading.clear()
    return found


def test_how_arrivals_during_reads_are_found() -> None:
    lines = {  # text, lower half and upper half
        "load": ("LDS R19, [R6+0x28400]", 0x0284000006137984, 0x000E620000000800),
        "use": ("SEL R6, RZ, 0x1, !P0", 0x00000001FF067807, 0x002FD00004000000),
        "other use": ("SHF.L.U32 R7, R7, 0x1f, RZ", 0x0000001F07077819, 0x000FC800000006FF),
        "arrive": ("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R10+URZ+0x294f0], RZ", 0x0294F0FF0AFF79A7, 0x0005E2000810003F),
        "fence": ("MEMBAR.ALL.CTA", 0x0000000000007992, 0x000FEC0000002000),
    }

    def found(*names: str) -> int:
        format_of = "/*0000*/ {} ; /* 0x{:016x} */\n/* 0x{:016x} */"
        return len(arrivals_during_reads("\n".join(format_of.format(*lines[name]) for name in names)))

    assert found("load", "arrive") == found("load", "other use", "arrive", "arrive") - 1 == 1
    assert found("load", "use", "arrive") == found("load", "fence", "arrive") == found("arrive", "load") == 0


@needs_library
def test_arrivals_wait_for_reads() -> None:
    """Otherwise this is a race, which shows in results rarely if ever."""
    arrivals = 0
    for kernel in machine_code():
        name = kernel.split("\n", 1)[0]
        arrivals += kernel.count("SYNCS.ARRIVE.TRANS64.A1T0")
        known = sum(count for part, count in READS_BESIDE_ARRIVALS.items() if part in name)
        assert len(arrivals_during_reads(kernel)) <= known, name
    assert arrivals > 1000
