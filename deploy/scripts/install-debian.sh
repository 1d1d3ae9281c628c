#!/usr/bin/env bash
# install-debian.sh [GROUP...]: install the Debian packages that a group of tasks needs, and only
# those that are missing.  Groups:
#   test   what `make test` and `make check` use (default); includes vm
#   vm     what tests/vm boots and runs: QEMU, NVMe tools, and a kernel unpacked into .vm
#   bench  what `make bench` uses besides
# Run as root; a second run does nothing.
set -euo pipefail

declare -A packages=(
  [test]="make gcc libc6-dev"
  [vm]="qemu-system-x86 busybox-static kmod nvme-cli fio python3-pyverbs ibverbs-providers rdma-core iproute2"
  [bench]="fio g++ python3-dev"
)

groups=("${@:-test}")
[[ " ${groups[*]} " == *" test "* && " ${groups[*]} " != *" vm "* ]] && groups+=(vm)

wanted=()
for group in "${groups[@]}"; do
  if [[ -z ${packages[$group]+set} ]]; then
    echo "install-debian.sh: no group '$group'; there are: ${!packages[*]}" >&2
    exit 2
  fi
  read -ra names <<<"${packages[$group]}"
  wanted+=("${names[@]}")
  # Debian splits venv from its Python; a Python built from source has it.
  if [[ $group == test ]] && ! "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null; then
    wanted+=(python3 python3-venv)
  fi
done

missing=()
for name in "${wanted[@]}"; do
  if [[ $(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null) != installed ]]; then
    missing+=("$name")
  fi
done
fetch_kernel() { "$(dirname "${BASH_SOURCE[0]}")/fetch-vm-kernel.sh"; }

if ((${#missing[@]} == 0)); then
  echo "Debian packages: nothing to install (${wanted[*]})"
else
  if ((EUID != 0)); then
    echo "install-debian.sh: run as root to install: ${missing[*]}" >&2
    exit 1
  fi
  echo "Debian packages: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
if [[ " ${groups[*]} " == *" vm "* ]] && ! fetch_kernel; then
  # The archive keeps only its newest kernel, so an old list names one that is gone.
  ((EUID == 0)) || exit 1
  apt-get update -qq
  fetch_kernel
fi
