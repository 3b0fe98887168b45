"""A chosen few kernels compiled ahead of time, and the tool that reads what came out. In a process of its own: kernels that were
imported for the interpreter cannot be compiled."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from octavo_kernels.triton.aot import machine_code
from octavo_kernels.triton.aot.case import Case, faults
from octavo_kernels.triton.aot.check import all_cases
from octavo_kernels.triton.aot.compile import Compiled, compiling
from octavo_kernels.triton.aot.estimate import Work, blocks_per_multiprocessor, floor_s, issue_share
from octavo_kernels.triton.aot.machine_code import Code
from octavo_kernels.triton.aot.report import BEGIN, END, Result, merged, read_rows, table, write
from octavo_kernels.triton.aot.targets import TARGETS

H200, MI300 = TARGETS["sm_90"], TARGETS["gfx942"]
ALL = frozenset({"no spills", "matrix units", "wide async loads"})


def compile_cases(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo_kernels.triton.aot", "--jobs", "2", *options],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_chosen_cases_compile_and_fall_short_of_nothing() -> None:
    done = compile_cases("--chosen", "--targets", "sm_90")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 fall short" in done.stdout
    assert done.stdout.count("sm_90") >= 10
    assert "HGMMA" in done.stdout


def test_attention_of_chunks_compiles_for_the_other_targets() -> None:
    only = "attention, chunks bf16, pages bf16, head 128"
    done = compile_cases("--only", only, "--targets", "sm_80,sm_100,gfx942")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for target, units in (("sm_80", "HMMA"), ("sm_100", "UTCHMMA"), ("gfx942", "v_mfma")):
        line = next(line for line in done.stdout.splitlines() if line.startswith(target))
        assert units in line
        assert " 0 B spilled" in line


def test_kernels_are_not_compiled_anew_for_another_number_of_rows() -> None:
    script = Path(__file__).with_name("noted_rows.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for counts in json.loads(done.stdout).values():
        assert counts.pop("int4_linear_kernel") == 2  # tiles of 16 rows and of 64
        assert set(counts.values()) == {1}, counts
        assert len(counts) == 7


def test_decodes_beside_other_projects(tmp_path: Path) -> None:
    peer = [sys.executable, "bench/kernels_peer.py", "--sequences", "64"]
    done = subprocess.run(peer, capture_output=True, text=True, check=True)
    cells = next(line for line in done.stdout.splitlines() if line.startswith("| Octavo")).split(" | ")
    registers, spilled, keys, instructions = (int(cells[i]) for i in (1, 2, 5, 6))
    assert registers <= 128  # four blocks of four warps fit on a multiprocessor
    assert spilled == 0
    assert keys == 64
    assert instructions < 2000  # what the least of the others takes is in docs/kernels.md
    done = subprocess.run([*peer, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has none of vllm/" in done.stderr


def compiled(warps: int = 4, shared_bytes: int = 71680) -> Compiled:
    return Compiled("attention_kernel", (8, 198), warps, 3, shared_bytes, b"", "")


def code(registers: int = 154, spilled_bytes: int = 0, **counts: int) -> Code:
    widths = Counter({"LDGSTS.E.BYPASS.128": counts.pop("wide", 0), "LDGSTS.E": counts.pop("narrow", 0)})
    counts["LDGSTS"] = widths.total()
    return Code(registers, spilled_bytes, 1000, Counter(counts), widths, Counter(HMMA=32, FADD=368), 8192, 32 * 2048)


def case(traits: frozenset[str] = ALL) -> Case:
    return Case("a", "b", "attention_kernel", lambda gpu: None, Work(1.0), traits)  # type: ignore[arg-type]


def test_what_a_kernel_lacks_is_named() -> None:
    good = code(HMMA=32, wide=16)
    assert faults(case(), compiled(), good, H200) == []
    assert faults(case(), compiled(), code(HMMA=32, wide=64, narrow=8), H200) == []  # the scales of int8
    assert "112 bytes" in faults(case(), compiled(), code(255, 112, HMMA=1, wide=1), H200)[0]
    assert faults(case(), compiled(), code(wide=16), H200) == ["no matrix instructions"]
    assert faults(case(), compiled(), code(HMMA=32), H200) == ["no asynchronous loads"]
    assert "only 0%" in faults(case(), compiled(), code(HMMA=32, narrow=16), H200)[0]
    assert "shared memory" in faults(case(), compiled(shared_bytes=300000), good, H200)[0]
    assert faults(case(frozenset({"no spills"})), compiled(), code(), H200) == []
    assert faults(case(), compiled(shared_bytes=60000), code(v_mfma=4), MI300) == []  # AMD loads by registers


@pytest.mark.parametrize(
    ("registers", "warps", "shared_bytes", "blocks"),
    [(154, 4, 71680, 3), (154, 4, 104448, 2), (255, 8, 65536, 1), (168, 4, 0, 3), (32, 1, 0, 32), (128, 4, 1000, 4)],
)
def test_blocks_that_fit_on_a_multiprocessor(registers: int, warps: int, shared_bytes: int, blocks: int) -> None:
    assert blocks_per_multiprocessor(compiled(warps, shared_bytes), code(registers), H200) == blocks


def test_blocks_that_fit_on_a_compute_unit() -> None:
    assert blocks_per_multiprocessor(compiled(4, 20000), code(128), MI300) == 3  # by shared memory
    assert blocks_per_multiprocessor(compiled(4, 0), code(256), MI300) == 2  # by registers
    assert blocks_per_multiprocessor(compiled(4, 0), code(32), MI300) == 8  # by places


def test_estimates() -> None:
    assert floor_s(Work(4.8e9, 1.0), H200, H200.memory_bytes_per_s) == (pytest.approx(1e-3), "memory")
    assert floor_s(Work(1.0, 989e9), H200, H200.memory_bytes_per_s) == (pytest.approx(1e-3), "matrix")
    # 400 instructions of 4 warps take 400 clocks; 32 KiB come to one of 132 multiprocessors in 0.9 µs, 1,649 clocks.
    share = issue_share(compiled(), code(), H200)
    assert share == pytest.approx(400 / (32768 / (4.8e12 / 132) * 1.83e9))
    assert issue_share(compiled(), code(), MI300) is None
    assert issue_share(compiled(), replace(code(), loop=Counter()), H200) is None


LISTING = """
.L_x_1:
        /*0000*/                   LDG.E.128 R4, [R2] ;
.L_x_2:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], [R2] ;
        /*0020*/              @!P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/                   FADD R1, R1, R2 ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0050*/                   HMMA.16816.F32.BF16 R24, R4, R6, R24 ;
        /*0060*/               @P2 BRA `(.L_x_3) ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_4:
        /*0090*/                   BRA `(.L_x_4);
"""


def test_the_main_loop_is_the_innermost_with_most_matrix_work(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = "Function k:\n  REG:255 STACK:24 SHARED:1024 LOCAL:0 CONSTANT[0]:648"
    monkeypatch.setattr(machine_code, "_run", lambda tool, *_: usage if tool == "cuobjdump" else LISTING)
    read = machine_code.read(compiled(), H200)
    assert (read.registers, read.spilled_bytes, read.instructions) == (255, 24, 10)
    assert read.loop == Counter(LDGSTS=1, HGMMA=1, FADD=1, BRA=1)  # one of these does more than many of the other
    assert (read.loop_bytes, read.loop_products) == (512, 64 * 64 * 16 // 4)
    assert read.matrix == "HGMMA+HMMA"
    assert read.async_loads == 1
    assert read.wide_share == 1.0


def test_amd_assembly_is_read() -> None:
    text = """
    v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
    global_load_dwordx4 v[0:3], v[4:5], off
    .vgpr_count:     128
    .vgpr_spill_count: 3
    .sgpr_spill_count: 0
    """
    read = machine_code.read(Compiled("k", (1,), 4, 2, 0, b"", text), MI300)
    assert (read.registers, read.spilled_bytes) == (128, 12)
    assert read.matrix == "v_mfma"


def result(target: str, spilled_bytes: int = 0) -> Result:
    return Result(
        *("attention, decodes", "bf16", target, 154, spilled_bytes, 71680, 3, "HMMA", 48, 1328, 423, 0.25),
        *(1.2e9, 1e9, 2.5e-4, 3.6e-4, "memory", ("112 bytes of registers spilled",) if spilled_bytes else ()),
    )


def test_the_table_replaces_the_one_before(tmp_path: Path) -> None:
    document = tmp_path / "kernels.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    hidden = replace(result("sm_90"), variant="bf16, head 64")
    write(document, [result("sm_90"), result("sm_80", 112), hidden])
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| attention"))
    assert "154, 70 K, 3 |" in row
    assert "112 B spilled" in row
    assert "head 64" not in text
    rows = list(csv.DictReader((tmp_path / "kernels.csv").open()))
    assert [row["variant"] for row in rows] == ["bf16", "bf16", "bf16, head 64"]
    assert rows[1]["spilled_bytes"] == "112"
    assert rows[1]["faults"] == "112 bytes of registers spilled"
    assert len(table([result("sm_90")]).splitlines()) == 3
    assert read_rows(document) == [result("sm_90"), result("sm_80", 112), hidden]
    (tmp_path / "other.md").write_text("no marks")
    with pytest.raises(ValueError, match="no marks"):
        write(tmp_path / "other.md", [])


def test_rows_of_other_cases_stay(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "kernels.md") == []
    old = [result("sm_80", 112), result("sm_90", 8), replace(result("sm_90"), variant="gone")]
    pairs = [("attention, decodes", "bf16", target) for target in ("sm_90", "sm_80", "gfx942")]
    assert merged([result("sm_90")], old, pairs) == [result("sm_90"), result("sm_80", 112)]


def test_the_table_of_the_docs_is_whole_and_nothing_falls_short() -> None:
    rows = read_rows(Path(__file__).parents[3] / "docs" / "kernels.md")
    wanted = [(case.group, case.variant, target) for case in all_cases() for target in TARGETS]
    assert [(row.group, row.variant, row.target) for row in rows] == wanted
    assert [row.line() for row in rows if row.faults] == []


def test_nothing_compiles_where_kernels_are_interpreted() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), compiling(H200.compiler):
        pass
