#!/bin/bash
# Runs deploy/ansible/k3s.yaml twice on a stand-in for a machine of k3s: /etc and
# /var/lib of this machine with a layer above that goes away, and a systemctl that says
# that k3s and its agent run and writes down who is restarted. One machine is server and
# agent. No k3s runs here, nor does anything read what the play leaves.
#
#   k3s-stand-in.sh PLAY CHART IMAGE RESULTS
#
# It must be process 1 of namespaces of its own: unshare --mount --net --pid --fork
# --mount-proc --propagation private.
set -euo pipefail
play=$1 chart=$2 image=$3 results=$4
box=$results/box
mkdir "$box"
mount -t tmpfs box "$box"
mkdir "$box"/{etc,etc.work,lib,lib.work,bin,home}
mount -t overlay etc -o "lowerdir=/etc,upperdir=$box/etc,workdir=$box/etc.work" /etc
mount -t overlay lib -o "lowerdir=/var/lib,upperdir=$box/lib,workdir=$box/lib.work" /var/lib
mkdir -p /etc/rancher/k3s
printf '# by hand\nflannel-backend: host-gw\n' >/etc/rancher/k3s/config.yaml

printf systemd >/proc/1/comm # by which Ansible knows it
cat >"$box/bin/systemctl" <<EOF
#!/bin/sh
case "\$1" in
list-units) printf '%s.service loaded active running stand-in\n' k3s k3s-agent ;;
show) printf 'LoadState=loaded\nActiveState=active\nSubState=running\n' ;;
restart) echo "\$2" >>"$results/restarts" ;;
esac
EOF
chmod +x "$box/bin/systemctl"
[[ ! -e /usr/bin/systemctl ]] || mount --bind "$box/bin/systemctl" /usr/bin/systemctl # where Ansible looks first
ip link set lo up
python3 -c 'import socket, time
server = socket.create_server(("127.0.0.1", 6443))
time.sleep(900)' & # what the play waits for as the API server

cat >"$box/inventory" <<'EOF'
[k3s_server]
server-0
[k3s_agent]
agent-0
[all:vars]
ansible_connection=local
ansible_python_interpreter=/usr/bin/python3
EOF
export HOME=$box/home PATH=$box/bin:$PATH LC_ALL=C.UTF-8 ANSIBLE_NOCOLOR=1 ANSIBLE_PIPELINING=1
for run in first second; do
  timeout 300 ansible-playbook -i "$box/inventory" "$play" -e "spillway_chart=$chart" -e "spillway_image=$image" >"$results/$run.log" 2>&1 ||
    { cat "$results/$run.log"; exit 1; }
  cp "$results/restarts" "$results/$run.restarts"
done
cp /etc/rancher/k3s/config.yaml "$results/config.yaml"
cp /var/lib/rancher/k3s/server/manifests/spillway.yaml "$results/manifest.yaml"
cp /var/lib/rancher/k3s/agent/images/spillway.tar "$results/image.tar"
