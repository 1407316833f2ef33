#!/usr/bin/env bash
# Every test, as CI runs them: set-up, layering, C++, Python, tools, the C++ tests again under clang's AddressSanitizer and
# UBSan, and brief fuzzing of every parser.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh --with-tests --with-dump
step() { printf '\n== %s\n' "$*"; }

step "layers: who includes whom"
python3 scripts/check_layers.py

step "release build and C++ tests"
cmake --preset release -DKVQ_TESTS=ON >/dev/null
cmake --build --preset release | tail -n 1
ctest --preset release -j "$(nproc)"

step "Python: second reader, dump scripts, tools, README"
KVQ_BIN=build/release/tools .venv/bin/python -m pytest -q tests/python tests/cli

step "clang with AddressSanitizer and UBSan: C++ tests and fuzzing"
cmake --preset asan >/dev/null
cmake --build --preset asan | tail -n 1
ctest --preset asan -j "$(nproc)"
