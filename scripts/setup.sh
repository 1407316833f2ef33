#!/usr/bin/env bash
# Installs what kvq needs: Debian packages (with root or sudo) and a Python environment in .venv. Safe to run twice.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
usage: scripts/setup.sh [--with-tests] [--with-dump] [--with-mpi] [--with-cuda-libs] [--no-packages] [--check]

  (nothing)      compilers, libraries, and .venv with numpy, h5py, safetensors, pytest
  --with-tests   also the test libraries, clang (sanitizers, fuzzing), chromium (the HTML report) and Open MPI
  --with-dump    also torch and transformers in .venv, for scripts/dump_qkv.py and scripts/perplexity.py;
                 a torch that python3 already has is used as it is
  --with-mpi     also Open MPI, for kvq-calibrate-mpi
  --with-cuda-libs
                 also cuBLAS and cuSOLVER 13 in .venv (1.2 GB), for kvq-calibrate --device cuda where the CUDA
                 Toolkit lacks them
  --no-packages  only .venv: system packages are yours to install (a system without apt-get)
  --check        say what is missing, install nothing; exit 1 if something is
TEXT
}

with_tests=0 with_dump=0 with_mpi=0 with_cuda_libs=0 with_packages=1 check=0
for word in "$@"; do
  case "$word" in
    --with-tests) with_tests=1 ;;
    --with-dump) with_dump=1 ;;
    --with-mpi) with_mpi=1 ;;
    --with-cuda-libs) with_cuda_libs=1 ;;
    --no-packages) with_packages=0 ;;
    --check) check=1 ;;
    -h | --help) usage; exit 0 ;;
    *) echo "setup.sh: error: unknown flag $word" >&2; usage >&2; exit 2 ;;
  esac
done

packages=(cmake ninja-build g++ python3 python3-venv libeigen3-dev libhdf5-dev libcli11-dev libfmt-dev
          nlohmann-json3-dev libvalijson-dev libtbb-dev libopenblas-dev libxxhash-dev)
[ $((with_tests + with_mpi)) -gt 0 ] && packages+=(openmpi-bin libopenmpi-dev)
[ $with_tests = 1 ] && packages+=(catch2 librapidcheck-dev clang-19 libclang-rt-19-dev chromium)

has_package() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
# A compiler or interpreter from another source than Debian is accepted, too.
has_tool() {
  case "$1" in
    cmake)
      command -v cmake >/dev/null &&
        cmake --version | awk 'NR==1 { split($3, v, "."); exit !(v[1] > 3 || v[1] == 3 && v[2] >= 25) }' ;;
    ninja-build) command -v ninja >/dev/null ;;
    g++ | python3) command -v "$1" >/dev/null ;;
    chromium)
      local browser
      for browser in chromium chromium-browser google-chrome google-chrome-stable; do
        if command -v "$browser" >/dev/null; then return 0; fi
      done
      return 1 ;;
    python3-venv) python3 -c 'import venv, ensurepip' 2>/dev/null ;;
    *) return 1 ;;
  esac
}
[ $with_packages = 1 ] || packages=()
missing=()
for package in ${packages[@]+"${packages[@]}"}; do
  has_package "$package" || has_tool "$package" || missing+=("$package")
done

venv=.venv
# .venv sees the packages of the system's interpreter, not those of a virtual environment that is active now.
own_torch() { python3 -c 'import sys, torch; sys.exit(sys.prefix != sys.base_prefix)' 2>/dev/null; }
# What a part of .venv was made from; it is made again when the interpreter or a pinned version changes.
recipe() { python3 -c 'import sys; print(sys.version)'; cat "$1"; }
is_current() {
  local made_from="$venv/$(basename "$1").installed"
  [ -x $venv/bin/python ] && [ -f "$made_from" ] && recipe "$1" | cmp -s - "$made_from"
}
install_part() {
  $venv/bin/python -m pip install --quiet --disable-pip-version-check "${@:2}" -r "$1"
  recipe "$1" >"$venv/$(basename "$1").installed"
}
light=scripts/requirements.txt dump=scripts/requirements-dump.txt cuda=scripts/requirements-cuda.txt

if [ $check = 1 ]; then
  status=0
  if [ ${#missing[@]} -gt 0 ]; then echo "missing packages: ${missing[*]}"; status=1; fi
  is_current $light || { echo "missing or outdated: $venv"; status=1; }
  if [ $with_dump = 1 ] && ! is_current $dump; then
    echo "missing or outdated: torch and transformers in $venv"
    status=1
  fi
  if [ $with_cuda_libs = 1 ] && ! is_current $cuda; then
    echo "missing or outdated: cuBLAS and cuSOLVER in $venv"
    status=1
  fi
  [ $status = 0 ] && echo "everything is there"
  exit $status
fi

if [ ${#missing[@]} -gt 0 ]; then
  if ! command -v apt-get >/dev/null; then
    echo "setup.sh: error: no apt-get here to install (Debian's names): ${missing[*]}" >&2
    echo "hint: install your system's packages of these, then run: scripts/setup.sh --no-packages" >&2
    exit 5
  fi
  echo "installing ${missing[*]}"
  sudo=""
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "setup.sh: error: root is needed to install: ${missing[*]}" >&2; exit 3; }
    sudo=sudo
  fi
  export DEBIAN_FRONTEND=noninteractive
  $sudo apt-get update -qq
  $sudo apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
fi

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup.sh: error: python3 is $(python3 -V), expected 3.11 or later" >&2
  exit 5
fi
if ! is_current $light; then
  echo "preparing $venv"
  python3 -m venv $venv
  install_part $light
fi
if [ $with_dump = 1 ] && ! is_current $dump; then
  if own_torch; then
    echo "using the torch that python3 has"
    sed -i 's/^include-system-site-packages = false/include-system-site-packages = true/' $venv/pyvenv.cfg
    install_part $dump
  else
    echo "installing torch and transformers into $venv"
    install_part $dump torch==2.13.0
  fi
fi
if [ $with_cuda_libs = 1 ] && ! is_current $cuda; then
  echo "installing cuBLAS and cuSOLVER into $venv"
  install_part $cuda
fi
