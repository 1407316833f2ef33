#!/usr/bin/env bash
#SBATCH --job-name=kvq-layers
#SBATCH --array=0-35
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH --time=01:00:00
#SBATCH --output=kvq-layers-%A-%a.log
# Collects the statistics of one layer of a dump as one task of a Slurm array. `kvq-calibrate --dry-run` predicts memory
# and time of a layer. For a model of 36 layers:
#
#   job=$(sbatch --parsable --array=0-35 examples/batch/layers_slurm.sh DUMP FOLDER --method oscar)
#   sbatch --dependency=afterok:"$job" --wrap \
#     "kvq-calibrate --merge-stats FOLDER/*.safetensors --stats FOLDER.safetensors --output ARTIFACT --method oscar"
#
# DUMP and FOLDER are on a disk that all nodes share. A task that failed or ran out of time is submitted again
# (--array=17), and --resume takes over what it had collected.
set -euo pipefail

if (($# < 2)); then
  echo "usage: sbatch --array=0-N examples/batch/layers_slurm.sh DUMP FOLDER [FLAG of kvq-calibrate...]" >&2
  exit 2
fi
dump=$1 folder=$2 layer=${SLURM_ARRAY_TASK_ID:?"runs as a task of a Slurm array: sbatch --array=0-35"}
shift 2
mkdir -p "$folder"
"${KVQ_CALIBRATE:-kvq-calibrate}" --model "$dump" --layers "$layer" --threads "${SLURM_CPUS_PER_TASK:-1}" \
  --stats-only --stats "$folder/$layer.safetensors" --resume --quiet "$@"
