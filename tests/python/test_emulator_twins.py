"""Each function of lib/kvq/device that holds an instruction has a twin of the same name in tests/emulator.
Kernels have no instructions of their own, because those would not be emulated."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY, EMULATED = ROOT / "lib/kvq/device", ROOT / "tests/emulator/kvq/device"
REPLACED = sorted(path.name for path in EMULATED.glob("*.cuh"))


def code_of(path: Path) -> str:
    """The text without comments, with continued lines joined."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text().replace("\\\n", "\n"), flags=re.S)
    return re.sub(r"\s+", " ", text)


def parameters(code: str, start: int) -> str:
    """The text from behind the parenthesis before `start` to the one that closes it."""
    depth = 1
    for end in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[end], 0)
        if depth == 0:
            return code[start:end]
    raise ValueError("a parenthesis is not closed")


def count(text: str) -> int:
    """How many parameters a list has. Parameters of kvq's device functions hold no commas."""
    return text.count(",") + 1 if text.strip() else 0


def functions(code: str, prefix: str) -> set[tuple[str, int]]:
    """(name, number of parameters) of each function that begins with the prefix, a result, and a name."""
    found = re.finditer(prefix + r"[\w:]+(?: [\w:]+)*?[ &*]+(\w+(?:##\w+)?) ?\(", code)
    return {(match[1], count(parameters(code, match.end()))) for match in found}


def library_functions(path: Path) -> set[tuple[str, int]]:
    """Functions of the library; names that a macro pastes together are written out."""
    code = code_of(path)
    found = set()
    for name, size in functions(code, r"__device__ __forceinline__ "):
        start, _, pasted = name.partition("##")
        endings = re.findall(r'"\w+", (\w+)(?=, P0)', code) if pasted else [""]
        assert endings, f"{path.name}: {name}: no macro gives {pasted}"
        found |= {(start + ending, size) for ending in endings}
    return found


def emulated_functions(path: Path) -> set[tuple[str, int]]:
    """Functions of the emulated device, without those that only serve others in its headers."""
    code = code_of(path)
    everywhere = " ".join(map(code_of, EMULATED.glob("*.cuh")))
    found = functions(code, r"(?:\binline |\btemplate <[^>]*> )")
    definitions = {name: sum(other == name for other, _ in found) for name, _ in found}
    return {
        (name, size)
        for name, size in found
        if (name, size) in library_functions(LIBRARY / path.name)
        or len(re.findall(rf"\b{name}\b", everywhere)) <= definitions[name]
    }


def test_the_headers_are_read():
    found = library_functions(LIBRARY / "ptx.cuh") | library_functions(LIBRARY / "wgmma.cuh")
    assert found >= {("ex2", 1), ("mma_m16n8k16_bf16", 7), ("cp_async_wait_group", 0), ("wgmma_m64k16_fp16", 4)}
    for name in REPLACED:
        lines = re.findall(r"^.*__device__ __forceinline__", (LIBRARY / name).read_text(), re.M)
        assert len(functions(code_of(LIBRARY / name), r"__device__ __forceinline__ ")) == len(lines)


@pytest.mark.parametrize("name", REPLACED)
def test_each_function_has_a_twin(name):
    library, emulated = library_functions(LIBRARY / name), emulated_functions(EMULATED / name)
    assert {"only in lib/kvq/device": library - emulated, "only emulated": emulated - library} == {
        "only in lib/kvq/device": set(),
        "only emulated": set(),
    }


def test_instructions_are_in_headers_that_the_emulator_replaces():
    """Empty assembly is a barrier for the compiler and no instruction."""
    sources = [path for path in sorted((ROOT / "lib/kvq").rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert len(sources) > 100
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sources
        if re.search(r'\basm\b(?: volatile)? ?\( ?(?!"" ?:)', code_of(path))
    ]
    assert found == [f"lib/kvq/device/{name}" for name in REPLACED]
