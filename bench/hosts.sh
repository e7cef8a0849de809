#!/usr/bin/env bash
# bench/hosts.sh: see --help below.
#
# How it works:
#   1. Every host is a network namespace with a host name, an /etc/hosts and a /dev/shm of its own, held by a process
#      that sleeps. One more namespace is the switch: a bridge.
#   2. A host's eth0 is one end of a cable (veth), the other is a port of the switch. Both ends send at the rate that
#      was asked for (tc tbf), so a link carries that much in each direction, and no host receives more.
#   3. The ranks start inside their hosts with torchrun's variables. Ranks of two hosts have nothing but the link:
#      what tells hosts apart, here as in a cluster, is the host name.
#   4. Meanwhile others may enter a host, or pull its cable (--doors). When the ranks ended, the counters of each eth0
#      are read.
#   5. Namespaces have no names: they, their addresses and their links are gone once the last process in them is. All
#      processes die with this script, whatever ends it (a trap; SIGKILL of the parent's death behind that).
set -euo pipefail

readonly SKIP=77  # what test runners take for "cannot run here"
hosts=2 ranks=1 rate=1gbit delay=0 port=29500 report='' doors='' to_the_end=''

help() {
  cat <<'END_OF_HELP'
usage: bench/hosts.sh [OPTION...] -- COMMAND [ARGUMENT...]

Runs COMMAND as the ranks of a job on several hosts, all of them on this machine: each host is a network namespace with
a host name (host0, host1, ...) and a /dev/shm of its own; links of a given speed join them. Files are shared. Ranks
find torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT) and
GLOO_SOCKET_IFNAME.

  --hosts N      hosts (2)
  --ranks N      ranks on each host (1)
  --rate RATE    of each host's link, in each direction: as tc writes it, 100mbit, 1gbit, 10gbit; 0: not limited (1gbit)
  --delay TIME   of each link, one way: 1ms, 50us (0); needs the kernel's netem
  --port N       where the ranks meet (29500): no other program can be in its way
  --report FILE  write seconds and the bytes that each host sent and received, as JSON
  --doors FILE   write, once the hosts are there, the lines `switch PID`, `host0 PID`, ...: processes whose namespaces
                 one may enter meanwhile. The cable of host1 is pulled (and put back: up) by
                 nsenter --target SWITCH_PID --net ip link set port1 down
  --to-the-end   a rank that fails ends no other: for those that are to end, or go on, by themselves
  --help         this text

  bench/hosts.sh --ranks 2 -- build/release/cli/tesserae train examples/python-source.json --set hybrid_shard_degree=2
  bench/hosts.sh --ranks 2 --rate 100mbit -- python my_fsdp_script.py
  bench/hosts.sh --hosts 3 -- ip -brief address

Exit status: 0, or that of the first rank that failed (the others are ended then, but with --to-the-end); 64 for a
mistake in the options; 77 if this machine cannot do it: it takes root, iproute2 and util-linux. Ctrl-C ends the ranks.
Nothing is left behind.
END_OF_HELP
}

mistake() {
  echo "hosts.sh: $*" >&2
  echo "hosts.sh: bench/hosts.sh --help says what there is" >&2
  exit 64
}

can_not() {
  echo "hosts.sh: $*" >&2
  exit $SKIP
}

while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) help && exit 0 ;;
    --) shift && break ;;
    --to-the-end) to_the_end=1 && shift ;;
    --hosts | --ranks | --rate | --delay | --port | --report | --doors)
      [ $# -ge 2 ] || mistake "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    *) mistake "unknown option $1 (COMMAND comes after --)" ;;
  esac
done
[ $# -gt 0 ] || mistake "no command: bench/hosts.sh [OPTION...] -- COMMAND"
for number in hosts ranks port; do
  [[ ${!number} =~ ^[1-9][0-9]{0,4}$ ]] || mistake "--$number ${!number} is no positive number"
done
[ "$hosts" -le 250 ] || mistake "--hosts $hosts: at most 250"
bits=$(awk -v rate="$rate" 'BEGIN {
  scale["bit"] = 1; scale["kbit"] = 1e3; scale["mbit"] = 1e6; scale["gbit"] = 1e9
  unit = tolower(rate); sub(/^[0-9.]+/, "", unit)
  if (rate == "0") print 0
  else if (rate ~ /^[0-9]+(\.[0-9]+)?[kmgKMG]?[bB][iI][tT]$/ && rate + 0 > 0) printf "%.0f\n", rate * scale[unit]
}')
[ -n "$bits" ] || mistake "--rate $rate is no rate: write 100mbit, 1gbit, 2.5gbit, or 0 for no limit"
[[ $delay =~ ^(0|[0-9.]+(us|ms|s))$ ]] || mistake "--delay $delay is no time: write 50us or 1ms"

[ "$(uname -s)" = Linux ] || can_not "network namespaces need Linux"
[ "$(id -u)" -eq 0 ] || can_not "needs root: it makes network namespaces (in a container: the capability SYS_ADMIN)"
for tool in ip tc; do
  command -v $tool >/dev/null || can_not "needs $tool, of iproute2"
done
for tool in unshare nsenter setpriv; do
  command -v $tool >/dev/null || can_not "needs $tool, of util-linux"
done

set -m  # each job is a process group: what a rank started ends with it, and Ctrl-C at the terminal comes here alone
holders=() processes=() names=''
# COMMAND after this dies with this script, also if that ended before it could be told to.
with_us=(setpriv --pdeathsig KILL sh -c '[ "$PPID" = "$0" ] && exec "$@"' $$)

end_all() {
  trap '' INT TERM HUP
  rm -f "$names"
  exec 2>/dev/null  # the shell would report every process that it ends
  local process waited
  for process in "${processes[@]}"; do kill -TERM -- "-$process" 2>/dev/null || true; done
  for waited in {1..50}; do
    any_left || break
    sleep 0.1
  done
  for process in "${processes[@]}" "${holders[@]}"; do kill -KILL -- "-$process" 2>/dev/null || true; done
  wait 2>/dev/null || true
}
any_left() {
  local process
  for process in "${processes[@]}"; do
    if kill -0 -- "-$process" 2>/dev/null; then return 0; fi
  done
  return 1
}
trap end_all EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

make_namespace() {  # sets `holder`
  "${with_us[@]}" unshare --net --uts --mount sleep infinity </dev/null &>/dev/null &
  holder=$!
  holders+=("$holder")
  local attempt
  for attempt in {1..100}; do
    kill -0 "$holder" 2>/dev/null || can_not "this machine does not let root make network namespaces"
    # `sleep` is what unshare becomes when the namespaces are there.
    [ "$(cat "/proc/$holder/comm" 2>/dev/null)" != sleep ] || return 0
    sleep 0.02
  done
  can_not "no network namespace came to be within 2 seconds"
}
inside() {  # HOLDER COMMAND...
  nsenter --target "$1" --net --uts --mount "${@:2}"
}
shape() {  # HOLDER DEVICE
  local parent=(root)
  if [ "$bits" -gt 0 ]; then
    # What may go out at once: what comes in two milliseconds, and not less than one large packet.
    local burst=$((bits / 8 / 500 > 131072 ? bits / 8 / 500 : 131072))
    inside "$1" tc qdisc add dev "$2" root handle 1: tbf rate "${bits}bit" burst "$burst" latency 50ms ||
      can_not "this kernel has no tbf (module sch_tbf)"
    parent=(parent 1:1)
  fi
  if [ "$delay" != 0 ]; then
    inside "$1" tc qdisc add dev "$2" "${parent[@]}" netem delay "$delay" limit 100000 ||
      can_not "this kernel has no netem (module sch_netem): no --delay"
  fi
}

names=$(mktemp)  # gone as soon as it is mounted in all hosts
echo '127.0.0.1 localhost' >"$names"
for ((host = 0; host < hosts; ++host)); do
  # Sockets that speak both versions of IP see the second form.
  printf '%s host%d\n' "10.77.0.$((host + 1))" "$host" "::ffff:10.77.0.$((host + 1))" "$host" >>"$names"
done

make_namespace
switch=$holder
inside "$switch" ip link add bridge type bridge || can_not "this kernel makes no bridges"
inside "$switch" ip link set bridge up
host_holders=()
for ((host = 0; host < hosts; ++host)); do
  make_namespace
  host_holders+=("$holder")
  inside "$holder" hostname "host$host"
  inside "$holder" mount --bind "$names" /etc/hosts || can_not "cannot mount an /etc/hosts"
  inside "$holder" mount -t tmpfs -o mode=1777 hosts.sh /dev/shm || can_not "cannot mount a /dev/shm"
  inside "$switch" ip link add "port$host" type veth peer name eth0 netns "/proc/$holder/ns/net" ||
    can_not "this kernel makes no virtual Ethernet (veth)"
  inside "$switch" ip link set "port$host" master bridge up
  inside "$holder" ip link set lo up
  inside "$holder" ip address add "10.77.0.$((host + 1))/24" dev eth0
  inside "$holder" ip link set eth0 up
  shape "$holder" eth0
  # Delay is one way: only where a packet leaves its host.
  delay=0 shape "$switch" "port$host"
done
rm "$names"
if [ -n "$doors" ]; then
  {
    echo "switch $switch"
    for ((host = 0; host < hosts; ++host)); do echo "host$host ${host_holders[host]}"; done
  } >"$doors.tmp"
  mv "$doors.tmp" "$doors"  # whoever waits for it finds all of it
fi

start=$EPOCHREALTIME
for ((rank = 0; rank < hosts * ranks; ++rank)); do
  "${with_us[@]}" nsenter --target "${host_holders[rank / ranks]}" --net --uts --mount \
    env --chdir="$PWD" RANK=$rank WORLD_SIZE=$((hosts * ranks)) LOCAL_RANK=$((rank % ranks)) LOCAL_WORLD_SIZE="$ranks" \
    GROUP_RANK=$((rank / ranks)) MASTER_ADDR=10.77.0.1 MASTER_PORT="$port" GLOO_SOCKET_IFNAME=eth0 \
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$@" </dev/null &
  processes+=($!)
done

status=0
running=("${processes[@]}")
while [ ${#running[@]} -gt 0 ] && { [ $status -eq 0 ] || [ -n "$to_the_end" ]; }; do
  ended='' ended_with=0
  wait -n -p ended "${running[@]}" || ended_with=$?
  [ $status -ne 0 ] || status=$ended_with
  left=()
  for process in "${running[@]}"; do
    if [ "$process" != "$ended" ]; then left+=("$process"); fi
  done
  running=("${left[@]}")
done
seconds=$(awk -v from="$start" -v to="$EPOCHREALTIME" 'BEGIN {printf "%.3f", to - from}')

if [ -n "$report" ]; then
  counted() {  # of eth0 on each host: the field after the name, 1 received, 9 sent
    for holder in "${host_holders[@]}"; do
      inside "$holder" awk -v field="$1" '/eth0:/ {sub(/.*eth0:/, ""); print $field}' /proc/net/dev
    done | paste -sd ,
  }
  printf '{"hosts": %d, "ranks_per_host": %d, "rate_bits_per_second": %d, "delay": "%s", "seconds": %s, "sent_bytes": [%s], "received_bytes": [%s], "status": %d}\n' \
    "$hosts" "$ranks" "$bits" "$delay" "$seconds" "$(counted 9)" "$(counted 1)" $status >"$report"
fi
exit $status
