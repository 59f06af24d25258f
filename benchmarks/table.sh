#!/usr/bin/env bash
# The table of docs/benchmarks.md: every shape and storage type beside the peer, and the storage types of
# 0.5b beside each other. Models are made side by side at first, and measured one after the other.
#
#   benchmarks/table.sh OUT BIN_DIR [options of beside_peer.py, such as --tune fast]
#
# OUT/SHAPE-WEIGHTS holds the rows, OUT/storage-types.json the last comparison; what fails is named and
# the rest goes on. PYTHON is the interpreter (python3).
set -uo pipefail
out=$1 peer=$2
shift 2
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
rows=(
  "0.5b fp16 -p 32,512,2048 -d 32,4096"
  "1.5b int4 -p 512 -d 32"
  "7b int4 -p 512,2048 -d 32"
  "7b fp16 -p 512 -d 32"
  "0.5b int8 -p 512 -d 32"
  "0.5b int4 -p 2048 -d 32"
)
declare -A making
for row in "${rows[@]}"; do
  read -r shape weights _ <<<"$row"
  "$python" "$here/beside_peer.py" "$shape" "$weights" "$out" --peer "$peer" --make \
    >"$out/make-$shape-$weights.log" 2>&1 &
  making[$shape-$weights]=$!
done
failed=0
declare -A missing
for model in "${!making[@]}"; do # nothing is measured while a model is made
  wait "${making[$model]}" || missing[$model]=1
done
for row in "${rows[@]}"; do
  read -r shape weights options <<<"$row"
  if [[ ${missing[$shape-$weights]:-} ]]; then
    echo "$shape $weights: not made; see $out/make-$shape-$weights.log" >&2
    failed=1
    continue
  fi
  # shellcheck disable=SC2086
  "$python" "$here/beside_peer.py" "$shape" "$weights" "$out" --peer "$peer" --rounds 3 -r 2 \
    $options "$@" || failed=1
done
"$python" "$here/storage_types.py" "$out"/0.5b-{fp16,int8,int4}.vxm -o "$out/storage-types.json" "$@" ||
  failed=1
exit $failed
