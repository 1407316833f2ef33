#!/usr/bin/env bash
# Compares every artifact that changed since a git revision with what it was there, for CI: see scripts/github_actions.yml.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gate_artifacts.sh BASE [--model HELDOUT.h5] [--out FOLDER] [kvq-diff flags ...]

Runs kvq-diff for each *.safetensors file of this git repository that differs from revision BASE, and kvq-inspect --verify for each new
one. Leaves FOLDER/summary.md and FOLDER/<name>.xml (JUnit) [kvq-gate]. Tools come from KVQ_BIN [build/release/tools].
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
git rev-parse --verify --quiet "$base^{commit}" >/dev/null || { echo "gate_artifacts.sh: error: no revision $base" >&2; exit 2; }

mkdir -p "$out"
old=$(mktemp -d)
trap 'rm -rf "$old"' EXIT
: >"$out/summary.md"
worst=0

# The first other failure than a failed rule wins: it says that something could not be judged.
note() { if [ "$1" -ne 0 ] && { [ "$worst" -eq 0 ] || [ "$worst" -eq 6 ]; }; then worst=$1; fi; }

while IFS= read -r -d '' file; do
  code=0
  if git cat-file -e "$base:$file" 2>/dev/null; then
    git show "$base:$file" >"$old/old.safetensors"
    "$bin/kvq-diff" "$old/old.safetensors" "$file" --markdown --quiet --junit "$out/${file//\//_}.xml" ${flags[@]+"${flags[@]}"} >"$old/part.md" || code=$?
    { printf '## %s\n\n' "$file"; cat "$old/part.md"; printf '\n'; } >>"$out/summary.md"
  else
    "$bin/kvq-inspect" "$file" --verify >"$old/part.txt" || code=$?
    { printf '## %s (new)\n\n```\n' "$file"; cat "$old/part.txt"; printf '```\n\n'; } >>"$out/summary.md"
  fi
  printf '%s: %s\n' "$file" "$([ $code = 0 ] && echo passed || echo "failed ($code)")"
  note "$code"
done < <(git diff --name-only -z --diff-filter=ACMR "$base" -- '*.safetensors')
[ -s "$out/summary.md" ] || echo "No artifact changed." | tee "$out/summary.md"
exit "$worst"
