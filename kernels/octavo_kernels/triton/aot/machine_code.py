"""What a compiled kernel needs and does, read from its machine code with the tools that come with Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import triton

from octavo_kernels.triton.aot.compile import Compiled
from octavo_kernels.triton.aot.targets import Target

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Instructions of matrix units: Ampere's, Hopper's (with operands in shared memory), Blackwell's; AMD's.
MATRIX = {"HMMA", "HGMMA", "UTCHMMA", "v_mfma"}
# Loads into shared memory that no thread waits for: Ampere's by thread, Hopper's by tile.
ASYNC = {"LDGSTS", "UTMALDG", "UBLKCP"}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")


@dataclass(frozen=True, slots=True)
class Code:
    """``counts`` and ``loop`` go by the instruction's name, ``widths`` by all of it.

    ``loop`` is the innermost loop that does most products per instruction, if any; a warp loads ``loop_bytes``
    asynchronously and does ``loop_products`` multiplications and additions in a round of it.
    """

    registers: int
    spilled_bytes: int
    instructions: int
    counts: Counter[str]
    widths: Counter[str] = field(default_factory=Counter)
    loop: Counter[str] = field(default_factory=Counter)
    loop_bytes: int = 0
    loop_products: int = 0

    @property
    def matrix(self) -> str:
        """Names of the matrix instructions there are."""
        return "+".join(sorted(name for name in MATRIX if self.counts[name]))

    @property
    def async_loads(self) -> int:
        """Loads into shared memory that no thread waits for."""
        return sum(self.counts[name] for name in ASYNC)

    @property
    def wide_share(self) -> float:
        """Share of what those load that comes 16 bytes a thread. (The scales of int8 pages come four at a time.)"""
        moved: Counter[int] = Counter()
        for name, count in self.widths.items():
            moved[_copied(name)] += _copied(name) * count
        return moved[16] / max(1, moved.total())


def read(compiled: Compiled, target: Target) -> Code:
    """The kernel's needs and instructions."""
    return _nvidia(compiled.binary) if target.gpu.nvidia else _amd(compiled.assembly)


def _nvidia(cubin: bytes) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        listing = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage}")
    registers, stack, local = map(int, found.groups())
    lines, labels = _listing(listing)
    names = [_name(line) for line in lines]
    short = (name.split(".")[0] for name in names)
    loops = [names[first : last + 1] for first, last in _innermost(lines, labels)]
    best = max(loops, key=lambda loop: _products(loop) / len(loop), default=[])
    if not _products(best):
        best = []
    widths = Counter(name for name in names if name.startswith(("LDG", "STG")))
    return Code(
        registers,
        max(stack, local),
        len(lines),
        Counter(short),
        widths,
        Counter(name.split(".")[0] for name in best),
        32 * sum(map(_copied, best)),
        _products(best),
    )


def _copied(name: str) -> int:
    """Bytes that an instruction copies to shared memory for one thread; 0 for any other instruction."""
    if name.split(".")[0] != "LDGSTS":
        return 0
    return 16 if ".128" in name else 8 if ".64" in name else 4


def _products(names: list[str]) -> int:
    """Multiplications and additions of matrix instructions, of one warp."""
    total = 0
    for name in names:
        if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
            m, n, k = map(int, found.groups())
            total += m * n * k // 4  # four warps issue it together
        elif found := re.match(r"HMMA\.(168)(16|8|4)\b", name):
            total += 16 * 8 * int(found[2])
        elif name.startswith("UTCHMMA"):
            total += 128 * 64 * 16 // 4  # its shape is in a descriptor
    return total


def _run(tool: str, *args: str) -> str:
    done = subprocess.run([str(TOOLS / tool), *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _listing(text: str) -> tuple[list[str], dict[str, int]]:
    """Instructions, and where labels point to among them."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(lines)
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction[1])
    return lines, labels


def _innermost(lines: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Loops (first, last instruction) that contain no other: backward branches around no other one's range."""
    loops = []
    for i, line in enumerate(lines):
        branch = _BRANCH.search(line)
        # A kernel ends in a branch to itself, which traps what runs past the end.
        if branch and labels.get(branch[1], i) < i:
            loops.append((labels[branch[1]], i))
    return [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]


def _name(line: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", line).split()[0]


def _amd(assembly: str) -> Code:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    names = re.findall(r"^\s+([a-z]\w+)", assembly, re.M)
    short = Counter("v_mfma" if name.startswith("v_mfma") else name for name in names)
    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    return Code(number("vgpr_count"), 4 * spills, sum(short.values()), short)
