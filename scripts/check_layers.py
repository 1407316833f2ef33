#!/usr/bin/env python3
"""Holds the real #includes of lib/kvq against the floors of docs/architecture.md, keeps the folders of kernels apart
from each other, and keeps what depends on a GPU's architecture in device/. Standard library only."""

import argparse
import pathlib
import re
import sys

# For each module, the modules that it may include directly. It may also include all that those may include.
# docs/architecture.md draws this graph.
NEEDS = {
    "core": [],
    "plan": ["core"],
    "container": ["core"],
    "dump": ["container"],
    "codec": ["plan"],
    "device": ["plan"],
    "artifact": ["codec", "container"],
    "runtime": ["device", "artifact"],
    "compute": ["codec", "device"],
    "stats": ["compute", "dump", "container", "artifact"],
    "solve": ["compute"],
    "eval": ["solve", "dump", "artifact"],
    "diff": ["eval"],
    "methods": ["solve", "stats"],
}

# Third-party headers, by pattern, and the modules that may include them.
THIRD_PARTY = {
    r"hdf5\.h|H5\w*\.h": {"dump"},
    r"CLI/": {"tools"},
    r"Eigen/": {"compute", "solve"},
    r"cblas\.h": {"compute"},
    r"oneapi/|tbb/": {"compute"},
    r"nlohmann/|valijson/": {"container"},
    r"cuda\w*\.h|cuda_\w+\.h": {"compute", "device", "runtime", "tools"},
    r"cublas\w*\.h|cusolver\w*\.h": {"compute"},
    r"mpi\.h": {"tools"},
    r"xxhash\.h": {"container", "dump", "stats", "tools"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def reachable(module):
    """All modules that `module` may include, itself first."""
    seen = [module]
    for name in seen:
        seen += [need for need in NEEDS[name] if need not in seen]
    return seen


def faults_of(path, module):
    """Yields one line for each include of `path` that the picture forbids."""
    for include in INCLUDE.findall(path.read_text(encoding="utf-8")):
        target = re.match(r"kvq/(\w+)/", include)
        if target and module != "tools" and target[1] not in reachable(module):
            yield f"{path}: {module} must not include {include}"
        for pattern, homes in THIRD_PARTY.items():
            if re.match(pattern, include) and module not in homes:
                yield f"{path}: {include} belongs to {', '.join(sorted(homes))}, not to {module}"


KERNELS = "lib/kvq/runtime/kernels"
# What a folder of kernels may include of the library, besides itself and common/, which includes no folder of a verb.
KERNEL_MODULES = ("core", "plan", "device")


def kernel_faults(path, folder):
    """Yields one line for each include of a kernel file that reaches beyond its verb's `folder`."""
    for include in INCLUDE.findall(path.read_text(encoding="utf-8")):
        target = re.match(r"kvq/(\w+)/(?:kernels/(\w+)/)?", include)
        if not target or target[1] in KERNEL_MODULES:
            continue
        if target[2] is None:
            modules = ", ".join(KERNEL_MODULES)
            yield f"{path}: kernels include {modules} and kernels alone, not {include}"
        elif target[2] not in (folder, "common"):
            homes = folder if folder == "common" else f"{folder}/ and common"
            yield f"{path}: expected includes of {homes}/, found {include}"


# What depends on an architecture: device/ has one function for it, unless the whole file is for one architecture.
ARCHITECTURE = re.compile(r"__CUDA_ARCH__|\b(?:__)?asm(?:__)?\b")


def architecture_faults(path):
    """Yields one line for each place of a file that names an architecture or has inline assembly."""
    if path.name.startswith("sm90_"):
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = ARCHITECTURE.search(line.split("//")[0])
        if found:
            yield f"{path}:{number}: {found[0]} belongs to device/ or to a file sm90_*"


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    faults = []
    folders = {root / "lib/kvq" / name: name for name in NEEDS} | {root / "tools": "tools"}
    for folder, module in folders.items():
        files = [p for p in sorted(folder.rglob("*")) if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]
        if not files:
            faults.append(f"{folder}: no sources, expected module {module}")
        for path in files:
            found = list(faults_of(path, module))
            if module != "device":
                found += architecture_faults(path)
            if root / KERNELS in path.parents:
                found += kernel_faults(path, path.relative_to(root / KERNELS).parts[0])
            faults += [fault.replace(str(root) + "/", "") for fault in found]
    unknown = [p.name for p in (root / "lib/kvq").iterdir() if p.is_dir() and p.name not in NEEDS]
    faults += [f"lib/kvq/{name}: not in the picture" for name in unknown]
    print("\n".join(faults) or "layers: every include follows the picture")
    return 6 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
