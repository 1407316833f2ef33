#!/usr/bin/env bash
# Calibrates one dump with several processes of this machine. Each process collects the statistics of one layer, and the
# last step decides. The artifact has the bytes that a single kvq-calibrate would write.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: examples/batch/layers_xargs.sh DUMP NUM_LAYERS ARTIFACT [FLAG...]

  DUMP        of scripts/dump_qkv.py, with layers 0 to NUM_LAYERS - 1
  ARTIFACT    to write; statistics of the layers go to ARTIFACT.layers, which is removed at the end
  FLAG        flags of kvq-calibrate, such as --method kvq; the same for every layer

A run that was interrupted continues: layers whose statistics are in ARTIFACT.layers are not collected again.
KVQ_CALIBRATE names the program [kvq-calibrate], JOBS the number of processes [the number of processors].
TEXT
}

if (($# < 3)) || [[ ! $2 =~ ^[1-9][0-9]*$ ]]; then
  usage >&2
  exit 2
fi
dump=$1 num_layers=$2 artifact=$3
shift 3
calibrate=${KVQ_CALIBRATE:-kvq-calibrate}
folder=$artifact.layers
mkdir -p "$folder"

# A statistics file appears under its name only when it is whole.
for ((layer = 0; layer < num_layers; ++layer)); do
  [[ -e $folder/$layer.safetensors ]] || printf '%s\0' "$layer"
done | xargs -0 -r -P "${JOBS:-$(nproc)}" -I LAYER \
  "$calibrate" --model "$dump" --layers LAYER --threads 1 --stats-only --stats "$folder/LAYER.safetensors" --resume \
  --quiet "$@"

mapfile -t files < <(seq -f "$folder/%.0f.safetensors" 0 $((num_layers - 1)))
"$calibrate" --merge-stats "${files[@]}" --stats "$folder/all.safetensors" --output "$artifact" "$@"
rm -r "$folder"
