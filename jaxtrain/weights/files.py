"""Files of named tensors, read without running anything in them: safetensors, and what `torch.save` writes."""

import collections
import io
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import StorageError, UserError

Tensors = dict[str, np.ndarray]
INDEX = ".index.json"  # of weights in several files, as the hub has large models
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", INDEX)
_SAFE = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_STORAGES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_NESTED = ("state_dict", "model")  # where training scripts put the weights, beside other things
_LARGEST_HEADER = 100_000_000  # as the format's own reader has it


def read(path: Path) -> Tensors:
    """The tensors of a file, or of all files of an index, by name, mapped into memory where that can be done.

    Raises UserError for a file that is not there, damaged, of another kind, or that asks for code to be run.
    """
    found = _as_named(path)
    if found and all(name.startswith("module.") for name in found):  # as DistributedDataParallel calls them
        found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    return found


def _as_named(path: Path) -> Tensors:
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path} is no file of weights by its name; expected {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        return _reader(path)(path)
    except UserError:
        raise
    except Exception as error:  # a damaged file fails anywhere
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path} cannot be read as weights: {reason}; copy or download it again") from error


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file, there whole or not at all. Raises StorageError where it cannot be written."""
    names = {np.dtype(dtype): name for name, dtype in _SAFE.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                file.write(np.ascontiguousarray(tensor).tobytes())
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; give another path") from error


def shards(index: Path) -> list[str]:
    """The files of an index, which lie beside it. Raises UserError where it is damaged or names files elsewhere."""
    return sorted(set(_weight_map(index).values()))


def _reader(path: Path) -> Callable[[Path], Tensors]:
    if path.name.endswith(INDEX):
        return _indexed
    return _safetensors if path.suffix == ".safetensors" else _torch


def _indexed(path: Path) -> Tensors:
    """https://huggingface.co/docs/safetensors/metadata_parsing: which tensor is in which file."""
    where = _weight_map(path)
    parts = {name: _as_named(path.with_name(name)) for name in shards(path)}
    lacking = sorted(tensor for tensor, name in where.items() if tensor not in parts[name])
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise UserError(
            f"{path}: there is no {lacking[0]} in {where[lacking[0]]}, where it should be{more}; download all of the "
            "files again, of one version"
        )
    return {tensor: parts[name][tensor] for tensor, name in where.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set(found.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of weights ({error!r}); expected JSON with a `weight_map`") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SUFFIXES) or name.endswith(INDEX):
            raise UserError(f"{index} names {name!r}; expected files of weights that lie beside it")
    return dict(found)


def _safetensors(path: Path) -> Tensors:
    """https://github.com/huggingface/safetensors#format: the length of a header, a header in JSON, then all bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_LARGEST_HEADER, path.stat().st_size - 8):
            raise ValueError(f"its header would have {length} bytes")
        header = json.loads(file.read(length))
    size = path.stat().st_size - 8 - length
    data = np.memmap(path, np.uint8, "r", offset=8 + length, shape=(size,)) if size else np.zeros(0, np.uint8)
    found = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        begin, end = about["data_offsets"]
        dtype, shape = np.dtype(_SAFE[about["dtype"]]), tuple(about["shape"])
        if not 0 <= begin <= end <= size or end - begin != dtype.itemsize * math.prod(shape):
            raise ValueError(f"tensor {name} would lie at bytes {begin} to {end} of {size}")
        found[name] = data[begin:end].view(dtype).reshape(shape)
    return found


def _torch(path: Path) -> Tensors:
    """A zip of one pickle and the bytes of its storages. Only what rebuilds tensors is known to our unpickler."""
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{path} is not of the form that torch.save writes since 1.6; save it again with a newer PyTorch"
        )
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (root,) = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
            raise ValueError("it is of a machine with the other byte order")
        content = _Unpickler(archive, root, path).load()
    for name in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}, expected a state_dict")
    return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, np.ndarray)}


class _Unpickler(pickle.Unpickler):
    """Knows ordered dicts and tensors, and nothing else by name: no other function can be reached, so none is run."""

    def __init__(self, archive: zipfile.ZipFile, root: str, path: Path):
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self._archive, self._root, self._path = archive, root, path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in _STORAGES:
            return np.dtype(_STORAGES[name])
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _parameter
        raise UserError(
            f"{self._path} asks for {module}.{name}, which is no part of a tensor, and nothing in a file is run; save "
            "the state_dict alone: torch.save(model.state_dict(), path)"
        )

    def persistent_load(self, reference: Any) -> np.ndarray:
        kind, dtype, key, _, count = reference
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise ValueError(f"it refers to a {kind}")
        return np.frombuffer(self._archive.read(f"{self._root}data/{key}"), dtype, count)


def _tensor(storage: np.ndarray, offset: int, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    """As PyTorch lays a tensor over a storage; strides count elements."""
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 in shape:
        return np.zeros(shape, storage.dtype)
    if min(offset, *strides, 0) < 0 or last >= len(storage):
        raise ValueError(f"a tensor {list(shape)} lies outside of its {len(storage)} numbers")
    found = np.lib.stride_tricks.as_strided(
        storage[offset:], tuple(shape), tuple(stride * storage.itemsize for stride in strides), writeable=False
    )
    return np.asarray(found)


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    return tensor
