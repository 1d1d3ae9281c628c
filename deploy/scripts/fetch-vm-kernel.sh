#!/usr/bin/env bash
# fetch-vm-kernel.sh [FOLDER]: unpack Debian's generic kernel for the tests in tests/vm into FOLDER
# (default: .vm in the repository).  Nothing is installed: the package is downloaded, unpacked and
# removed.  The generic kernel it has to be, the cloud one lacks 9p.  A second run does nothing.
#
# FOLDER then holds root/boot/vmlinuz-RELEASE, root/lib/modules/RELEASE and, written last, release.
# When the configured archive has moved on since the last `apt-get update`, run that first.
set -euo pipefail

folder=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.vm}
package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '$1 == "Depends:" {print $2; exit}')
if [[ -z $package && -s $folder/release ]]; then
  echo "kernel for tests/vm: $(<"$folder/release") stays, the archive's list is absent"
  exit 0
fi
if [[ -z $package ]]; then
  echo "fetch-vm-kernel.sh: no package linux-image-amd64: run apt-get update; this needs Debian" >&2
  exit 1
fi
release=${package#linux-image-}
if [[ -s $folder/release && $(<"$folder/release") == "$release" ]]; then
  echo "kernel for tests/vm: $release is there"
  exit 0
fi

mkdir -p "$folder"
work=$(mktemp -d "$folder/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "kernel for tests/vm: fetching $package"
# As root apt warns that its own user cannot write here; that is only a warning.
(cd "$work" && apt-get download -qq "$package" 2>apt.log) || { cat "$work/apt.log" >&2; exit 1; }
# What no test needs is three quarters of the files.
mkdir "$work/root"
dpkg-deb --fsys-tarfile "$work"/*.deb | tar -x -C "$work/root" \
  --exclude='*/drivers/gpu' --exclude='*/drivers/media' --exclude='*/drivers/iio' \
  --exclude='*/drivers/net/wireless' --exclude='*/drivers/usb' --exclude='*/drivers/hid' \
  --exclude='*/sound' --exclude='*/staging' ./boot ./lib
PATH=$PATH:/usr/sbin:/sbin depmod -b "$work/root" "$release"
rm -rf "$folder/root" "$folder/release"
mv "$work/root" "$folder/root"
echo "$release" >"$folder/release"
