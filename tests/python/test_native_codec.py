"""libkvq_codec through ctypes equals the PyTorch codec bit for bit, and refuses what it cannot search."""

import ctypes

import numpy as np
import pytest
from code_samples import TRELLISES, outliers, rows, same_bits, trellis, trellis_scheme

torch = pytest.importorskip("torch")

from kvq import native_codec, torch_codec  # noqa: E402
from kvq.errors import KvqError  # noqa: E402
from kvq.scheme import SEARCHES  # noqa: E402


@pytest.fixture(scope="module")
def native():
    codec = native_codec.open_native_codec()
    if codec is None:
        pytest.skip("libkvq_codec is not built")
    return codec


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("bits, memory", TRELLISES[:-1])  # PyTorch needs seconds for the largest
@pytest.mark.parametrize("size, groups", [(8, 3), (70, 2), (97, 2)])
def test_codes_are_those_of_pytorch(native, bits, memory, size, groups, search):
    scheme = trellis_scheme(bits, trellis(bits, memory)[1], size, "norm", "fp16", search)
    y = torch.from_numpy(rows(3, 5, size * groups)).reshape(5, groups, size)
    found = native.best_paths(y, scheme)
    assert found.dtype == torch.uint8 and torch.equal(found, torch_codec.best_paths(y, scheme))


@pytest.mark.parametrize("search", SEARCHES)
def test_ties_and_infinite_costs_are_those_of_pytorch(native, search):
    rng = np.random.default_rng(15)
    for bits, memory in TRELLISES[:7]:
        theta = rng.integers(-2, 3, bits * (memory + 1)).astype(float).tolist()
        scheme = trellis_scheme(bits, theta, 9, search=search)
        y = torch.from_numpy(rng.integers(-1, 2, (20, 1, 9)).astype(np.float32))
        assert torch.equal(native.best_paths(y, scheme), torch_codec.best_paths(y, scheme))
    scheme = trellis_scheme(1, trellis(1, 6)[1], 40, "rms", "fp16", search)
    y = torch.from_numpy(outliers(40))[:, None]
    assert torch.equal(native.best_paths(y, scheme), torch_codec.best_paths(y, scheme))


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_codes_do_not_depend_on_threads_or_strides(native, threads, search):
    scheme = trellis_scheme(2, trellis(2, 3)[1], 16, "norm", "fp16", search)
    y = torch.from_numpy(rows(4, 16, 3 * 23)).reshape(16, 3, 23).permute(2, 1, 0)  # not contiguous
    expected, before = torch_codec.best_paths(y, scheme), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(native.best_paths(y, scheme), expected)
        assert native.best_paths(y[:0], scheme).shape == (0, 3, 16)
    finally:
        torch.set_num_threads(before)


def test_the_search_takes_the_place_of_pytorchs(native, monkeypatch):
    scheme = trellis_scheme(1, trellis(1, 7)[1], 32, "norm", "fp16")
    x = torch.from_numpy(rows(5, 6, 64))
    expected, called = torch_codec.fake_quantize(x, scheme), []
    search = lambda y, scheme: called.append(y.shape) or native.best_paths(y, scheme)
    monkeypatch.setitem(torch_codec.FASTER_SEARCH, "cpu", search)
    assert same_bits(torch_codec.fake_quantize(x, scheme).numpy(), expected.numpy()) and called == [(6, 2, 32)]


def test_what_packing_does_not_allow_is_refused_in_one_line(native):
    scheme = trellis_scheme(1, trellis(1, 7)[1], 8, "norm", "fp16")
    with pytest.raises(KvqError, match="channels: expected 8 to 1024, found 7"):
        native.best_paths(torch.zeros(2, 1, 7), scheme)
    library, message = ctypes.CDLL(str(native.path)), ctypes.create_string_buffer(12)
    theta, y, codes = (ctypes.c_float * 18)(), (ctypes.c_float * 8)(), (ctypes.c_uint8 * 8)()

    def call(bits, memory, groups=1, threads=1, search=0):
        wide = ctypes.c_int64
        return library.kvq_codec_trellis(
            theta, bits, memory, search, y, wide(groups), wide(8), threads, codes, message, wide(len(message))
        )

    for search in range(len(SEARCHES)):
        assert call(1, 8, search=search) == 0 and message.value == b""
    wrong = ((0, 1), (1, 0), (1, 9), (2, 5), (9, 1), (1, 1, -1), (1, 1, 1, 0), (1, 1, 1, 2000))
    wrong += ((1, 1, 1, 1, -1), (1, 1, 1, 1, 2))
    for arguments in wrong:
        assert call(*arguments) == 1 and len(message.value) == 11, arguments


def test_a_library_of_another_version_and_a_broken_one_are_passed_over(native, monkeypatch, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / native_codec.FILE).write_bytes(b"no library")
    monkeypatch.setenv("KVQ_BIN", str(tmp_path / "tools"))
    assert native_codec.candidate_paths()[0] == tmp_path / "lib" / native_codec.FILE
    assert native_codec.open_native_codec().path == native.path
    monkeypatch.setattr(native_codec, "VERSION", 3)
    with pytest.raises(KvqError, match="expected interface 3, found 2"):
        native_codec.NativeCodec(native.path)
    assert native_codec.open_native_codec() is None
