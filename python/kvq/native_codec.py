"""The trellis search of libkvq_codec (lib/kvq/codec/codec_c.h), for CPUs: some fifty times as fast as PyTorch's.

The library is built with the tools. It is looked for in ../lib of the folders that may hold them: KVQ_BIN, the build
folder of this checkout, and the folder of `kvq-calibrate` on the PATH. Codes equal those of torch_codec.py.
"""

import ctypes
import os
import shutil
from pathlib import Path

from .errors import KvqError, one_line, unsupported
from .scheme import SEARCHES

FILE, VERSION = "libkvq_codec.so", 2
MESSAGE_BYTES = 400
CHECKOUT = Path(__file__).resolve().parents[2]


def candidate_paths() -> list[Path]:
    """Where the library may lie, the first choice first."""
    tools = [Path(os.environ["KVQ_BIN"])] if os.environ.get("KVQ_BIN") else []
    tools.append(CHECKOUT / "build/release/tools")
    if found := shutil.which("kvq-calibrate"):
        tools.append(Path(found).resolve().parent)
    return [folder.resolve().parent / "lib" / FILE for folder in tools]


class NativeCodec:
    """An open library."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
            version = self._library.kvq_codec_version()
        except (OSError, AttributeError) as error:
            raise unsupported(f"{path}: cannot load: {one_line(error)}") from error
        if version != VERSION:
            raise unsupported(f"{path}: expected interface {VERSION}, found {version}", "build the tools again")

    def best_paths(self, y, scheme):
        """torch_codec.best_paths: codes of y [N, G, g], uint8. y: float32 on the CPU"""
        import torch

        y = y.contiguous()
        codes = torch.empty(y.shape, dtype=torch.uint8)
        theta = (ctypes.c_float * len(scheme.theta))(*scheme.theta)
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        failed = self._library.kvq_codec_trellis(
            theta,
            scheme.bits,
            scheme.memory,
            SEARCHES.index(scheme.search),
            ctypes.c_void_p(y.data_ptr()),
            ctypes.c_int64(y.shape[0] * y.shape[1]),
            ctypes.c_int64(y.shape[2]),
            torch.get_num_threads(),
            ctypes.c_void_p(codes.data_ptr()),
            message,
            ctypes.c_int64(MESSAGE_BYTES),
        )
        if failed:
            raise unsupported(f"{self.path}: {message.value.decode(errors='replace')}")
        return codes


def open_native_codec() -> NativeCodec | None:
    """The first library that can be loaded; None if there is none."""
    for path in candidate_paths():
        if path.is_file():
            try:
                return NativeCodec(path)
            except KvqError:
                continue
    return None
