"""The tensors of a model's folder: safetensors by memory map, quantised matrices taken apart.

A tensor is read when it is asked for and goes from the mapped file to the device; the host never holds the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo_executor.quantization import QuantizationSpec
from octavo_executor.spec import ModelError, weight_files
from octavo_kernels import Fp8Rows, Int4Rows, WeightRows
from octavo_kernels.quantized import E4M3

# Where in a word of AWQ's the code of each of eight columns lies.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
PLACES = tuple(range(8))


class Checkpoint:
    """The tensors of a folder by name. They stay on disk until read; every one must be used."""

    def __init__(self, folder: Path, stack: ExitStack, device: torch.device | None = None) -> None:
        """Tensors come to lie on ``device`` where anything is to be computed with them, else they stay mapped.

        Raises:
            ModelError: a file is missing or not safetensors.
        """
        self.device = device or torch.device("cpu")
        # Matrices whose scales no backend's format has; they were widened as they were read.
        self.unfolded = 0
        self._files = {}
        self._unused: set[str] = set()
        for path in weight_files(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                self._files[name] = opened
                self._unused.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def _read(self, name: str) -> Tensor:
        if name not in self._files:
            raise ModelError(f"the checkpoint lacks {name}")
        self._unused.discard(name)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def take(self, name: str, *shape: int, dtypes: tuple[torch.dtype, ...] = ()) -> Tensor:
        """The tensor called ``name``, mapped.

        Raises:
            ModelError: it is missing, has another shape, or is none of ``dtypes`` (without any: no plain numbers).
        """
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}; config.json asks for {shape}")
        if tensor.dtype not in dtypes if dtypes else tensor.dtype.itemsize < 2 or not tensor.is_floating_point():
            raise ModelError(f"{name} holds {tensor.dtype}, which is not what config.json describes")
        return tensor

    def scales(self, name: str, count: int) -> Tensor:
        """float32[count] of a tensor that has one number for all, or ``count``.

        Raises:
            ModelError: it has another number of them.
        """
        tensor = self._read(name).float().reshape(-1)
        if len(tensor) not in (1, count):
            raise ModelError(f"{name} has {len(tensor)} numbers for {count} heads")
        return tensor.expand(count)

    def rows(self, name: str, count: int, columns: int, quantization: QuantizationSpec | None) -> WeightRows:
        """The matrix [count, columns] of the layer called ``name``, in however many bits it is stored.

        Raises:
            ModelError: a tensor is missing or is not what ``quantization`` says.
        """
        if quantization is not None:
            if f"{name}.qweight" in self or f"{name}.weight_packed" in self:
                readers = {"awq": self._awq, "gptq": self._gptq, "packed": self._packed}
                reader = readers.get(quantization.layout)
                if reader is not None:
                    return reader(name, count, columns, quantization)
            elif quantization.layout == "fp8" and self._is_fp8(f"{name}.weight"):
                return self._fp8(name, count, columns, quantization)
        return self.take(f"{name}.weight", count, columns)

    def _is_fp8(self, name: str) -> bool:
        return name in self and self._files[name].get_slice(name).get_dtype() == "F8_E4M3"

    def _codes(self, name: str, *shape: int) -> Tensor:
        return self.take(name, *shape, dtypes=(torch.int32,)).to(self.device)

    def _groups(self, name: str, columns: int, quantization: QuantizationSpec) -> int:
        size = quantization.group_size or columns
        if columns % size:
            raise ModelError(f"{name}: {columns} inputs do not make up groups of {size}")
        return columns // size

    def _awq(self, name: str, count: int, columns: int, quantization: QuantizationSpec) -> WeightRows:
        """Eight outputs in a word, in an order of AWQ's own; inputs down."""
        groups = self._groups(name, columns, quantization)
        codes = unpack(self._codes(f"{name}.qweight", columns, count // 8), AWQ_PLACES)
        zeros = unpack(self._codes(f"{name}.qzeros", groups, count // 8), AWQ_PLACES)
        return Int4Rows(codes.t().contiguous(), self._scales(f"{name}.scales", groups, count).t(), zeros.t())

    def _gptq(self, name: str, count: int, columns: int, quantization: QuantizationSpec) -> WeightRows:
        """Eight inputs in a word; of zeros eight outputs. With act-order an input's group is looked up."""
        groups = self._groups(name, columns, quantization)
        words = self._codes(f"{name}.qweight", columns // 8, count)
        codes = unpack(words.t().contiguous(), PLACES)
        # The older format's writers take 1 from every zero by one subtraction of words, borrows and all; so it is added.
        words = self._codes(f"{name}.qzeros", groups, count // 8) + quantization.zero_offset * 0x11111111
        zeros = unpack(words, PLACES).t()
        rows = Int4Rows(codes, self._scales(f"{name}.scales", groups, count).t(), zeros)
        return self._in_order(name, rows, f"{name}.g_idx")

    def _packed(self, name: str, count: int, columns: int, quantization: QuantizationSpec) -> WeightRows:
        """Eight inputs in a word, of zeros eight outputs; numbers count from -8."""
        groups = self._groups(name, columns, quantization)
        shape = self.take(f"{name}.weight_shape", 2, dtypes=(torch.int64, torch.int32)).tolist()
        if shape != [count, columns]:
            raise ModelError(f"{name} has shape {tuple(shape)}; config.json asks for {(count, columns)}")
        codes = unpack(self._codes(f"{name}.weight_packed", count, columns // 8), PLACES)
        scale = self._scales(f"{name}.weight_scale", count, groups)
        if f"{name}.weight_zero_point" in self:
            words = self._codes(f"{name}.weight_zero_point", count // 8, groups)
            zeros = unpack(words.t().contiguous(), PLACES).t()
        else:
            zeros = torch.full((count, groups), 8, dtype=torch.uint8, device=self.device)
        return self._in_order(name, Int4Rows(codes, scale, zeros), f"{name}.weight_g_idx")

    def _scales(self, name: str, *shape: int) -> Tensor:
        return self.take(name, *shape).to(self.device)

    def _in_order(self, name: str, rows: Int4Rows, index_name: str) -> WeightRows:
        """``rows`` where an input's group follows from its place, else (act-order) the numbers they stand for."""
        columns, groups = rows.codes.shape[1], rows.scale.shape[1]
        if index_name not in self:
            return rows
        index = self.take(index_name, columns, dtypes=(torch.int32, torch.int64)).long().to(self.device)
        if torch.equal(index, torch.arange(columns, device=self.device) // (columns // groups)):
            return rows
        if columns and not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise ModelError(f"{index_name} names groups that are not there")
        self.unfolded += 1
        centred = rows.codes.to(torch.int16) - rows.zero.to(torch.int16)[:, index]
        return centred.float() * rows.scale.float()[:, index]

    def _fp8(self, name: str, count: int, columns: int, quantization: QuantizationSpec) -> WeightRows:
        """One scale of all, or one per output, or (widened at once) one per block."""
        values = self.take(f"{name}.weight", count, columns, dtypes=(E4M3,)).to(self.device)
        for scheme in ("input_scale", "input_zero_point"):  # of static activations: here they are scaled by token
            if f"{name}.{scheme}" in self:
                self._read(f"{name}.{scheme}")
        scale_name = f"{name}.weight_scale_inv" if f"{name}.weight_scale_inv" in self else f"{name}.weight_scale"
        scale = self._read(scale_name).to(self.device).float()
        height, width = quantization.block
        if height and width and scale.shape == (-(-count // height), -(-columns // width)):
            self.unfolded += 1
            spread = scale.repeat_interleave(height, 0)[:count].repeat_interleave(width, 1)[:, :columns]
            return values.float() * spread
        if scale.numel() not in (1, count) or (height and width):
            raise ModelError(f"{scale_name} has shape {tuple(scale.shape)} for a matrix {(count, columns)}")
        return Fp8Rows(values, scale.reshape(-1).expand(count).contiguous())

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """Raises ModelError: tensors are left that the model has no place for."""
        extra = sorted(name for name in self._unused if not ignored(name))
        if extra:
            more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
            raise ModelError(f"the checkpoint has tensors this model has no place for: {', '.join(extra[:5])}{more}")

    def is_zero(self, name: str) -> bool:
        """Whether a tensor holds nothing but zeros."""
        return not bool(self._files[name].get_tensor(name).any())


def unpack(words: Tensor, places: tuple[int, ...]) -> Tensor:
    """Codes uint8[n, 8 m] of words int32[n, m]: column 8 j + i lies in bits 4 ``places[i]`` and following of word j."""
    shifts = torch.tensor([4 * place for place in places], dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)
