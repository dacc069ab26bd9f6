#!/bin/bash
# A throw-away SLURM with three nodes of four fake GPUs, for the tests.
# (apt-get install --no-install-recommends slurm-wlm munge)
#
#   lab.sh up DIR            keep DIR short, for it holds unix sockets; then:
#                            export SLURM_CONF=DIR/etc/slurm.conf
#                            export PATH=DIR/bin:$PATH
#   lab.sh down DIR
#   lab.sh kill-node DIR N   a crash: slurmd and all tasks get SIGKILL
#   lab.sh kill-slurmd DIR N the daemon alone: its tasks live on
#   lab.sh start-node DIR N  after either of them
#
# Partitions: gpu; urgent, which takes nodes from gpu's jobs after 30 s of
# grace; closed, where jobs wait for ever.
#
# LAB_CGROUP=yes (root, cgroups v1) a job's cgroup has no more memory than the job
#
# LAB_MODE=ns   (root) every node has its own pid, net, mount and uts namespace: own hostname, own IP; the host is not changed
# LAB_MODE=flat (any one user) all daemons on loopback; node names 0x7f000001.. are 127.0.0.1.. to getaddrinfo, so need no /etc/hosts
# shellcheck disable=SC1091,SC2046,SC2086 # run/settings; lists of pids
set -eu
cmd=${1:?command}; D=$(realpath -m "${2:?directory}"); n=${3:-}; self=$(realpath "$0"); export SLURM_CONF=$D/etc/slurm.conf
if [ "$cmd" = up ]; then
  : "${LAB_MODE:=ns}" "${LAB_NODES:=3}" "${LAB_GPUS:=4}" "${LAB_GPUTYPE:=h100}" "${LAB_CPUS:=64}" "${LAB_MEM:=512000}"
  : "${LAB_SLURMD_TIMEOUT:=30}" "${LAB_UP_TIMEOUT:=120}"
  if [ "$LAB_MODE" = ns ]; then P=node; else P=0x7f00000; fi
  if [ "${LAB_CGROUP-}" ]; then P=lab$$-; fi # the cgroups have the nodes' names
elif [ -e "$D/run/settings" ]; then . "$D/run/settings"
else echo "slurmlab: nothing is up in $D" >&2; [ "$cmd" = down ]; exit; fi

write_conf() {
  mkdir -p "$D"/{etc,state,run,log,dev,bin,lib,spool}; chmod 755 "$D" "$D"/*; declare -p LAB_MODE LAB_NODES P | sed 's/^declare -- //' > "$D/run/settings"
  (umask 077; head -c 128 /dev/urandom > "$D/etc/munge.key")
  if [ "$LAB_MODE" = ns ]; then ctl="labctl(10.77.0.1)"; base=6810; else ctl="$(hostname)(127.0.0.1)"; base=; until [ -n "$base" ] && ! ss -ltnH | grep -q ":${base%?}[0-9] "; do base=$((16000 + 10 * (RANDOM % 1500))); done; fi
  if mknod "$D/dev/nvidia0" c 195 0 2>/dev/null; then # fake GPUs: must be device nodes, need not work
    for i in $(seq $((LAB_GPUS - 1))); do mknod "$D/dev/nvidia$i" c 195 "$i"; done; dev=$D/dev/nvidia
  else dev=/dev/tty; fi
  echo "AutoDetect=off
Name=gpu Type=$LAB_GPUTYPE File=${dev}[0-$((LAB_GPUS - 1))]" > "$D/etc/gres.conf"
  printf 'CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n' > "$D/etc/cgroup.conf"
  cat > "$D/etc/slurm.conf" <<EOF
ClusterName=lab
SlurmctldHost=$ctl
SlurmctldPort=$base
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$D/run/munge.sock,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/$([ "${LAB_CGROUP-}" ] && echo cgroup || echo none)
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core${LAB_CGROUP:+_Memory}
GresTypes=gpu
ReturnToService=2
EnforcePartLimits=ALL
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.txt
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=15
MinJobAge=3600
SlurmctldTimeout=10
SlurmdTimeout=$LAB_SLURMD_TIMEOUT
MailProg=/bin/true
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
TmpFS=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
EOF
  printf '127.0.0.1 localhost\n10.77.0.1 labctl\n' > "$D/etc/hosts"
  for i in $(seq "$LAB_NODES"); do
    mkdir -p "$D/spool/$P$i"; echo "10.77.0.$((10 + i)) $P$i" >> "$D/etc/hosts"
    if [ "$LAB_MODE" = ns ]; then w="NodeAddr=10.77.0.$((10 + i)) Port=6818"; else w="NodeHostname=$(hostname) NodeAddr=127.0.0.$i Port=$((base + i))"; fi
    echo "NodeName=$P$i $w CPUs=$LAB_CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$LAB_CPUS ThreadsPerCore=1 RealMemory=$LAB_MEM Gres=gpu:$LAB_GPUTYPE:$LAB_GPUS State=UNKNOWN"
  done >> "$D/etc/slurm.conf"
  p="Nodes=ALL DefaultTime=10 MaxTime=INFINITE"
  cat >> "$D/etc/slurm.conf" <<EOF
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=gpu $p Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent $p PriorityTier=2 PreemptMode=OFF
PartitionName=closed $p State=DOWN
EOF
}
child_of() { # the first child of a pid (that file has no newline: read's status says nothing)
  for _ in $(seq 200); do c=; read -r c _ 2>/dev/null < "/proc/$1/task/$1/children" || true; [ -z "$c" ] || { echo "$c"; return; }; sleep 0.02; done; return 1
}
new_ns() { # command...: runs as pid 1 of new namespaces; leaves the pid of its unshare in $u
  setsid unshare --net --mount --uts --pid --fork --mount-proc --propagation private --kill-child=SIGKILL "$@" < /dev/null >> "$D/log/ns.out" 2>&1 & u=$!
}
IN() { if [ "$LAB_MODE" = ns ]; then nsenter -t "$(cat "$D/run/init.pid")" -m -u -n -p --wdns=/ -- "$@"; else "$@"; fi; }
daemons() { # --force: do not insist on the owner and mode of the parents of DIR
  munged --force --key-file="$D/etc/munge.key" --socket="$D/run/munge.sock" --pid-file="$D/run/munged.pid" \
    --log-file="$D/log/munged.log" --seed-file="$D/run/munged.seed" 2>> "$D/log/munged.err"; slurmctld -c
}
node_up() { # in the cluster's namespace
  i=${1#"$P"}; new_ns "$self" _node "$D" "$1"; c=$(child_of $u); echo "$c" > "$D/run/$1.init"
  until [ "$(readlink "/proc/$c/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
  ip link del "v$i" 2> /dev/null || true; ip link add "v$i" type veth peer name eth0 netns "$c"; ip link set "v$i" master br0 up
}
node_pids() { # flat: slurmstepds of a node (they hold its slurmd log open), then its job processes (by environment)
  for p in /proc/[0-9]*; do # shellcheck disable=SC2010 # links, not names
    [ "$(cat "$p/comm" 2>/dev/null)" != slurmstepd ] || ! ls -l "$p/fd" 2>/dev/null | grep -qF -- "-> $D/log/slurmd.$1.log" || echo "${p#/proc/}"; done
  for p in /proc/[0-9]*; do
    ! tr '\0' '\n' 2>/dev/null < "$p/environ" | awk -v c="SLURM_CONF=$SLURM_CONF" -v n="SLURMD_NODENAME=$1" \
      '$0==c{a=1} $0==n{b=1} /^SLURM_JOB_ID=/{j=1} END{exit !(a&&b&&j)}' || echo "${p#/proc/}"; done
}
forever() { while :; do sleep 3600 & wait $! || true; done; } # pid 1 of a namespace: bash reaps what it inherits

case $cmd in
up)
  [ ! -e "$D/run/settings" ] || "$self" down "$D"
  [ ! -e "$D" ] || [ -e "$D/etc/slurm.conf" ] || rmdir "$D" # refuses a directory that is neither empty nor an old lab
  rm -rf "$D"; write_conf
  if [ "$LAB_MODE" = ns ]; then
    new_ns "$self" _cluster "$D"; echo $u > "$D/run/unshare.pid"; c=$(child_of $u); echo "$c" > "$D/run/init.pid"
    for b in sbatch srun salloc squeue scancel scontrol sinfo; do
      # shellcheck disable=SC2016 # the shim's own
      printf '#!/bin/sh\nexec nsenter -t %s -m -u -n -p --wdns="$PWD" -- /usr/bin/%s "$@"\n' "$c" $b > "$D/bin/$b"; chmod 755 "$D/bin/$b"; done
    until [ -e "$D/run/started" ] || [ $SECONDS -ge "$LAB_UP_TIMEOUT" ]; do sleep 0.05; done
  else daemons; for i in $(seq "$LAB_NODES"); do slurmd -N "$P$i"; done; fi
  until [ "$(IN timeout 5 sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$LAB_NODES" ]; do
    if [ $SECONDS -ge "$LAB_UP_TIMEOUT" ]; then
      echo "slurmlab: not all nodes came up:" >&2; grep -hiE 'fatal|error' "$D"/log/* | grep -viE 'pmix|MPI:|state' >&2 || true
      "$self" down "$D"; exit 1
    fi; sleep 0.1; done;;
_cluster)
  hostname labctl; mount --bind "$D/etc/hosts" /etc/hosts
  mount -t tmpfs none "$D/bin" # jobs inherit the submitter's PATH: hide the nsenter shims from them
  for l in /usr/lib/*/pmix2/lib; do # SLURM looks for it by the name that it has in Debian's libpmix-dev
    cp -a "$l/." "$D/lib"; ln -sf libpmix.so.2 "$D/lib/libpmix.so"; mount --bind "$D/lib" "$l"; done
  ip link set lo up; ip link add br0 type bridge; ip addr add 10.77.0.1/24 dev br0; ip link set br0 up
  daemons; for i in $(seq "$LAB_NODES"); do node_up "$P$i"; done; touch "$D/run/started"; forever;;
_node)
  hostname "$n"; mount -t tmpfs shm /dev/shm; ip link set lo up; until ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
  ip addr add "10.77.0.$((10 + ${n#"$P"}))/24" dev eth0; ip link set eth0 up; slurmd -N "$n"; forever;;
_node_up) node_up "$n";;
kill-node)
  if [ "$LAB_MODE" = ns ]; then c=$(cat "$D/run/$n.init"); IN kill -9 "$c"; while IN test -d "/proc/$c"; do sleep 0.02; done
  else kill -9 "$(cat "$D/run/slurmd.$n.pid")" $(node_pids "$n") || true; fi;;
kill-slurmd)
  if [ "$LAB_MODE" = ns ]; then IN nsenter -t "$(cat "$D/run/$n.init")" -p -m -- kill -9 "$(cat "$D/run/slurmd.$n.pid")"
  else kill -9 "$(cat "$D/run/slurmd.$n.pid")"; fi;;
start-node)
  if [ "$LAB_MODE" = flat ]; then slurmd -N "$n"
  elif IN test -d "/proc/$(cat "$D/run/$n.init")"; then IN nsenter -t "$(cat "$D/run/$n.init")" -p -m -n -u -- slurmd -N "$n"
  else IN "$self" _node_up "$D" "$n"; fi;;
down)
  if [ "$LAB_MODE" = ns ]; then # pid 1's death takes every process, mount, link and namespace with it
    p=$(cat "$D/run/init.pid"); ! grep -qsz "^$D$" "/proc/$p/cmdline" || kill -9 "$p"
    for _ in $(seq 100); do [ -d "/proc/$p" ] || break; sleep 0.02; done
  else
    k=; for f in "$D"/run/slurmd.*.pid "$D/run/slurmctld.pid" "$D/run/munged.pid"; do [ ! -s "$f" ] || k="$k $(cat "$f")"; done
    for i in $(seq "$LAB_NODES"); do k="$k $(node_pids "$P$i")"; done
    kill -9 $k 2> /dev/null || true
  fi; [ "$P" = "${P#lab}" ] || find /sys/fs/cgroup/memory/slurm_"$P"* -depth -type d -exec rmdir {} +; rm -f "$D"/run/*.pid "$D/run/settings";;
*) echo "unknown command $cmd" >&2; exit 2;;
esac
