#!/usr/bin/env bash
# Compares every artifact that changed since a git revision with the version of that revision, for CI: see
# scripts/github_actions.yml.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gate_artifacts.sh BASE [--model HELDOUT.h5] [--out FOLDER] [kvq-diff flags ...]

Runs kvq-diff for each *.safetensors file of this git repository that differs from revision BASE, renamed ones
included, and kvq-inspect --verify for each new one. Deleted ones are named. Works with Git LFS. Leaves
FOLDER/summary.md and FOLDER/<name>.xml (JUnit) [kvq-gate]. Tools come from KVQ_BIN [build/release/tools].
Exit code: 0 all passed, 6 a rule or check failed, others as kvq-diff's.
TEXT
}

[ $# -ge 1 ] || { usage >&2; exit 2; }
case "$1" in -h | --help) usage; exit 0 ;; esac
base=$1 out=kvq-gate
shift
flags=()
while [ $# -gt 0 ]; do
  case "$1" in
    --out) [ $# -ge 2 ] || { usage >&2; exit 2; }; out=$2; shift 2 ;;
    *) flags+=("$1"); shift ;;
  esac
done
bin=${KVQ_BIN:-build/release/tools}
bin=$(cd "$bin" && pwd) || exit 2
mkdir -p "$out"
out=$(cd "$out" && pwd)
for i in "${!flags[@]}"; do  # absolute, because the folder changes below
  if [ -e "${flags[$i]}" ]; then flags[i]=$(realpath "${flags[$i]}"); fi
done
cd "$(git rev-parse --show-toplevel)"
if ! git rev-parse --verify --quiet "$base^{commit}" >/dev/null; then
  echo "gate_artifacts.sh: error: no revision $base" >&2
  exit 2
fi

old=$(mktemp -d)
trap 'rm -rf "$old"' EXIT
: >"$out/summary.md"
worst=0

# The first failure that is no failed rule decides the exit code, because then an artifact could not be judged.
note() { if [ "$1" -ne 0 ] && { [ "$worst" -eq 0 ] || [ "$worst" -eq 6 ]; }; then worst=$1; fi; }

# Makes a file name safe for a heading: one line, UTF-8, Markdown escaped.
heading() {
  printf '%s' "$1" | LC_ALL=C tr '\000-\037\177' '?' | iconv -c -f UTF-8 -t UTF-8 | sed 's/[][\\`*<>|#@&]/\\&/g'
}
# Prints a tool's text as a code block that the text cannot end.
code_block() { printf '\n'; iconv -c -f UTF-8 -t UTF-8 "$1" | sed 's/^/    /'; }

judge() {  # <path at BASE, or empty> <path now>
  local before=$1 file=$2 code=0
  if [ -n "$before" ]; then
    git cat-file --filters "$base:$before" >"$old/old.safetensors"  # --filters: the content behind a Git LFS pointer
    "$bin/kvq-diff" "$old/old.safetensors" "$file" --markdown --quiet --junit "$out/${file//\//__}.xml" \
      ${flags[@]+"${flags[@]}"} >"$old/part" 2>"$old/error" || code=$?
    { printf '## %s\n\n' "$(heading "$file")"; cat "$old/part"; } >>"$out/summary.md"
  else
    "$bin/kvq-inspect" "$file" --verify >"$old/part" 2>"$old/error" || code=$?
    { printf '## %s (new)\n' "$(heading "$file")"; code_block "$old/part"; } >>"$out/summary.md"
  fi
  if [ -s "$old/error" ]; then code_block "$old/error" >>"$out/summary.md"; cat "$old/error" >&2; fi
  printf '\n' >>"$out/summary.md"
  printf '%s: %s\n' "$file" "$([ $code = 0 ] && echo passed || echo "failed ($code)")"
  note "$code"
}

git diff --name-status -z -M "$base" -- '*.safetensors' >"$old/changed"
while IFS= read -r -d '' status && IFS= read -r -d '' path; do
  case "$status" in
    A) judge "" "$path" ;;
    D) printf '%s: deleted\n' "$path"; printf '%s: deleted\n' "$(heading "$path")" >>"$out/summary.md" ;;
    R* | C*) IFS= read -r -d '' now; judge "$path" "$now" ;;
    *) judge "$path" "$path" ;;
  esac
done <"$old/changed"
[ -s "$out/summary.md" ] || echo "No artifact changed." | tee "$out/summary.md"
exit "$worst"
