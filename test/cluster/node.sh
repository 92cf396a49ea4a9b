#!/bin/bash
# Process 1 of a node: makes the mounts that a machine has to itself, and waits.
#
#   node.sh NAME DIRECTORY CGROUP2 CGROUP
#
# It starts in the node's network namespace and in CGROUP2, a directory. The node's cgroup
# namespace begins at the parent of CGROUP2, where its containers are too. DIRECTORY, on a
# disk, keeps the node's files. CGROUP is the node's path in each hierarchy of cgroup v1.
set -euo pipefail
name=$1 dir=$2 cgroup2=$3 cgroup=$4 stage=${5-start}

fail() { echo "node.sh: $*" >&2; exit 1; }

# make_v1 makes the node's cgroup in each hierarchy of v1 and moves this process there.
make_v1() {
  local hierarchy path part file
  for hierarchy in /sys/fs/cgroup/*/; do
    [[ $hierarchy != */unified/ ]] || continue
    [[ -e ${hierarchy}cgroup.procs ]] || continue # a plain directory
    path=${hierarchy%/}
    for part in ${cgroup//\// }; do
      mkdir -p "$path/$part"
      for file in cpuset.cpus cpuset.mems; do # a new cpuset has none
        [[ ! -e $path/$file ]] || cat "$path/$file" >"$path/$part/$file"
      done
      path=$path/$part
    done
    echo 0 >"$path/cgroup.procs"
  done
}

# enable_controllers gives the children of a cgroup2, and of its parents, the controllers
# that the kubelet needs. Only the machine's root may have processes then.
enable_controllers() {
  local path=/sys/fs/cgroup part controller problem
  for part in "" ${1//\// }; do
    path+=${part:+/$part}
    for controller in cpuset cpu io memory hugetlb pids; do
      ! grep --quiet --word-regexp $controller "$path/cgroup.controllers" ||
        problem=$( (echo +$controller >"$path/cgroup.subtree_control") 2>&1) ||
        fail "enable controller $controller in $path: ${problem##*: }: a busy cgroup has processes: move them to a child"
    done
  done
}

if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
  layout=unified
elif [[ -d /sys/fs/cgroup/unified && -d /sys/fs/cgroup/memory ]]; then
  layout=hybrid
else
  fail "find cgroups: neither cgroup2 at /sys/fs/cgroup, nor the hybrid layout (/sys/fs/cgroup/unified and /sys/fs/cgroup/memory)"
fi

case $stage in
start)
  [[ $layout != hybrid ]] || make_v1
  echo 0 >"${cgroup2%/*}/cgroup.procs"
  exec unshare --cgroup "$BASH" "$0" "${@:1:4}" confined
  ;;
confined)
  echo 0 >"$cgroup2/cgroup.procs"
  [[ $layout != unified ]] || { path=${cgroup2%/*}; enable_controllers "${path#/sys/fs/cgroup/}"; }
  exec unshare --mount --uts --ipc --pid --fork --kill-child=KILL "$BASH" "$0" "${@:1:4}" inside
  ;;
esac

hostname "$name"
mount --make-rprivate /
# A copy of another program's mount would keep its namespace or file system alive.
findmnt --raw --noheadings --output TARGET | grep -E '^/(run|tmp)/' | sort -r | xargs --no-run-if-empty umount --lazy
mount --bind "$dir" /mnt # keeps the directory in reach when /var is covered
mount -t proc proc /proc
mount -t sysfs sysfs /sys
if [[ $layout == unified ]]; then
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
  mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
  while IFS=: read -r _ controllers _; do
    point=/sys/fs/cgroup/${controllers#name=}
    case $controllers in
      "") mkdir /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified ;;
      name=*) mkdir "$point" && mount -t cgroup -o "none,$controllers" cgroup "$point" ;;
      *) mkdir "$point" && mount -t cgroup -o "$controllers" cgroup "$point" ;;
    esac
  done </proc/self/cgroup
fi
mount -t bpf -o nosuid,nodev,noexec,mode=0700 bpf /sys/fs/bpf

mkdir -p /mnt/{run,containerd,kubelet,log}
for top in etc opt var; do
  mkdir -p /mnt/$top /mnt/.work/$top
  mount -t overlay -o "lowerdir=/$top,upperdir=/mnt/$top,workdir=/mnt/.work/$top" overlay /$top
done
mount --bind /mnt/run /run
mkdir -p /run/lock /run/netns
for pair in containerd:/var/lib/containerd kubelet:/var/lib/kubelet log:/var/log; do
  mkdir -p "${pair#*:}"
  mount --bind "/mnt/${pair%%:*}" "${pair#*:}"
done
rm -rf /opt/cni /etc/cni
mkdir -p /opt/cni/bin /etc/cni/net.d
cp /usr/lib/cni/{loopback,bridge,host-local,portmap} /opt/cni/bin
: >/etc/resolv.conf # cluster DNS forwards to no other server
mount --make-rshared /

touch /mnt/ready
trap 'exit 0' TERM
while :; do # bash reaps the processes whose parent ended
  sleep 60 &
  wait $! || true
done
