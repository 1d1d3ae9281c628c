#!/usr/bin/env bash
# check-module-size.sh LINES: fail when a tracked Python module is longer than LINES.
set -euo pipefail
limit=${1:?usage: check-module-size.sh LINES}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
modules=$(find common gpu_side proxy target_side deploy tests -name '*.py' -type f | LC_ALL=C sort)
long=$(while read -r file; do
  lines=$(wc -l <"$file")
  if ((lines > limit)); then echo "$file: $lines lines, more than $limit: split it"; fi
done <<<"$modules")
if [[ -n $long ]]; then
  echo "$long" >&2
  exit 1
fi
echo "modules: $(wc -l <<<"$modules"), each at most $limit lines"
