#!/usr/bin/env bash
# check-module-size.sh LINES: fail when a Python module is longer than LINES, or when two files of
# tests have one name: pytest can collect only one of them.
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
twins=$(find tests -name 'test_*.py' -type f -printf '%f\n' | sort | uniq -d)
if [[ -n $twins ]]; then
  echo "$twins: two files of tests with this name: rename one" >&2
  exit 1
fi
echo "modules: $(wc -l <<<"$modules"), each at most $limit lines"
