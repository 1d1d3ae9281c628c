#!/bin/busybox sh
# First program of the guest (see machine.py).  It lays a tmpfs over the host's root, which comes
# read-only over 9p, and hands over to agent.py there.  The kernel gives vm_* as variables.
b=/bin/busybox
die() { echo "vm: $*"; $b sleep 1; $b poweroff -f; }
share() { # TAG PLACE MODE CACHE
  $b mkdir -p "$2"
  $b mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3,cache=$4" "$1" "$2" || die "no $1"
}

$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in /modules/*; do $b insmod "$module" || die "insmod $module failed"; done

share host /host ro loose
$b mount -t tmpfs -o size=75% tmpfs /writes
$b mkdir /writes/upper /writes/work
$b mount -t overlay -o lowerdir=/host,upperdir=/writes/upper,workdir=/writes/work overlay /new \
  || die "no overlay"
for fs in proc sysfs devtmpfs; do
  case $fs in proc) at=proc ;; sysfs) at=sys ;; *) at=dev ;; esac
  $b mount -t $fs $fs /new/$at
done
$b mkdir -p /new/dev/pts /new/dev/shm /new/run
$b mount -t devpts devpts /new/dev/pts
$b mount -t tmpfs shm /new/dev/shm
$b mount -t tmpfs run /new/run
share modules "/new/usr/lib/modules/$vm_release" ro loose
share folder "/new$vm_folder" rw none

$b ip link set lo up
$b ip addr add 10.0.2.15/24 dev eth0 && $b ip link set eth0 up || die "no network"
$b ip route add default via 10.0.2.2

# PID 1 itself moves into the new root: kernel threads share its root, and the kernel's own
# requests for modules then find modprobe.
exec $b chroot /new "$vm_python" -I -S "$vm_folder/agent.py"
die "no $vm_python"
