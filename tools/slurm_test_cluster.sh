#!/usr/bin/env bash
# tools/slurm_test_cluster.sh: see --help below.
#
# How it works:
#   1. munged, slurmctld and a slurmd for each node run as whoever calls, with addresses of the loopback device and free
#      ports. Keys, sockets, logs, spools and the configuration are in one folder; /etc/slurm and /etc/munge are neither
#      read nor written.
#   2. Each slurmd is started in a UTS and a mount namespace, where the kernel lets us make them (root, or namespaces of
#      users): its node has a host name, the others' names (node1 is 127.0.0.1, node2 127.0.0.2, ...) and a /dev/shm of
#      its own. To ranks, the nodes are two hosts then. Elsewhere the nodes share this host's name, nobody can look
#      theirs up, and MASTER_ADDR says where ranks meet.
#   3. All that belongs to the cluster has SLURM_CONF=FOLDER/slurm.conf in its environment: daemons, and through slurmd
#      the processes of jobs, which have SLURM_JOB_ID besides. `down` cancels the jobs, waits, and ends what is left by
#      that sign, so that nothing escapes by having been reparented, whatever ended `up`.
set -euo pipefail

readonly MISSING=77  # what test runners take for "cannot run here"
readonly DEADLINE=60 # seconds, of every wait
readonly SLURM="slurmctld slurmd slurm-client munge" MPI="openmpi-bin mpich"
verb='' install=no nodes=2 folder=${TMPDIR:-/tmp}/tesserae-slurm-$(id -u)

help() {
  cat <<'END_OF_HELP'
usage: tools/slurm_test_cluster.sh up|down|status|install [OPTION...]

A Slurm cluster for tests, all of it on this machine: nodes node1, node2, ... of four CPUs each, as far as Slurm knows.
Jobs of its partition urgent take nodes away from those of the partition test, which is the default.

  up       start it; standard output is for the shell: eval "$(tools/slurm_test_cluster.sh up)". Ends one that is there.
  down     cancel its jobs, end its daemons and remove its folder; nothing to do is no error
  status   its nodes and jobs; fails unless all daemons answer
  install  the Debian packages that are missing, with apt-get (root, or sudo without a password): those of Slurm, and of
           Open MPI and MPICH, for tests/launch

  --install        up: install first what is missing of Slurm
  --nodes N        nodes (2)
  --folder FOLDER  of its state; two clusters have two (tesserae-slurm-UID in the folder for temporary files)
  --help           this text

  eval "$(tools/slurm_test_cluster.sh up)"
  srun --nodes 2 --ntasks-per-node 2 build/release/cli/tesserae train examples/tiny.json
  tools/slurm_test_cluster.sh down

Exit status: 0; 1 if it did not come up (what it had started is ended, and the ends of the logs are shown); 64 for a
mistake in the options; 77 if packages are missing, which are named.
END_OF_HELP
}

say() { echo "slurm_test_cluster: $*" >&2; }
mistake() {
  say "$*"
  say "--help says what there is"
  exit 64
}
fail() {
  say "$*"
  exit 1
}

while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) help && exit 0 ;;
    --install) install=yes && shift ;;
    --nodes | --folder)
      [ $# -ge 2 ] || mistake "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    up | down | status | install)
      [ -z "$verb" ] || mistake "$verb or $1?"
      verb=$1
      shift
      ;;
    *) mistake "unknown argument $1" ;;
  esac
done
[ -n "$verb" ] || mistake "up, down, status or install?"
[[ $nodes =~ ^[1-9][0-9]?$ ]] || mistake "--nodes $nodes is no number from 1 to 99"
[[ $folder =~ ^[A-Za-z0-9._/-]+$ ]] || mistake "--folder $folder: letters, digits and ._-/ only, Slurm reads it"
folder=$(realpath -m -- "$folder")
# A socket's path has at most 107 bytes.
[ ${#folder} -le 85 ] || mistake "--folder $folder is too long for the sockets in it: at most 85 characters"
export SLURM_CONF=$folder/slurm.conf
PATH=$PATH:/usr/sbin:/sbin

missing_packages() {  # of those that are named
  local package
  for package in "$@"; do
    case $package in
      slurmctld | slurmd) command -v "$package" >/dev/null || echo "$package" ;;
      slurm-client) command -v sbatch >/dev/null || echo "$package" ;;
      munge) command -v munged >/dev/null || echo "$package" ;;
      openmpi-bin) command -v mpirun.openmpi >/dev/null || echo "$package" ;;
      mpich) command -v mpirun.mpich >/dev/null || echo "$package" ;;
    esac
  done
}

install_missing() {
  local missing as_root=()
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$install" = no ] || ! command -v apt-get >/dev/null; then
    say "missing: ${missing[*]} (Debian packages; tools/slurm_test_cluster.sh install)"
    exit $MISSING
  fi
  [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
  say "installing ${missing[*]}"
  local get=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get)
  {
    "${get[@]}" install -y --no-install-recommends "${missing[@]}" ||
      { "${get[@]}" update && "${get[@]}" install -y --no-install-recommends "${missing[@]}"; }
  } >&2 || fail "apt-get could not install ${missing[*]}"
}

# The processes of the cluster: daemons and what they started, but not shells that only have our SLURM_CONF exported.
members() {
  local process environment
  for process in /proc/[0-9]*; do
    [ -O "$process" ] || [ "$(id -u)" -eq 0 ] || continue
    environment=$({ tr '\0' '\n' <"$process/environ"; } 2>/dev/null) || continue
    [[ $'\n'$environment$'\n' == *$'\n'"SLURM_CONF=$SLURM_CONF"$'\n'* ]] || continue
    [[ $'\n'$environment == *$'\n'TESSERAE_SLURM_DAEMON=* || $'\n'$environment == *$'\n'SLURM_JOB_ID=* ]] || continue
    [ "${process#/proc/}" -eq $$ ] || echo "${process#/proc/}"
  done
}

# wait_until WHAT COMMAND...: asks every tenth of a second; fails after the deadline, or if `daemon` has ended.
daemon=''
wait_until() {
  local what=$1 end=$((SECONDS + DEADLINE))
  shift
  until "$@"; do
    [ -z "$daemon" ] || kill -0 "$daemon" 2>/dev/null || { say "no $what: it has ended" && return 1; }
    [ $SECONDS -lt $end ] || { say "after $DEADLINE s: no $what" && return 1; }
    sleep 0.1
  done
}
slurm() { timeout --kill-after=5 10 "$@" </dev/null; }

no_jobs() { [ -z "$(slurm squeue --noheader --all 2>/dev/null || echo unknown)" ]; }
no_members() { [ -z "$(members)" ]; }
signal_members() {
  local left
  mapfile -t left < <(members)
  if [ ${#left[@]} -gt 0 ]; then kill "-$1" "${left[@]}" 2>/dev/null || true; fi
}

down() {
  daemon=''
  if [ -e "$SLURM_CONF" ] && [ -n "$(members)" ] && command -v scancel >/dev/null; then
    if slurm scontrol ping &>/dev/null; then
      slurm scancel --user="$(id -un)" &>/dev/null || true
      wait_until "end of its jobs" no_jobs || true
    fi
  fi
  signal_members TERM
  wait_until "end of its daemons by themselves" no_members || signal_members KILL
  wait_until "end of its processes, though killed" no_members || return 1
  if [ -e "$folder/is-a-slurm-test-cluster" ]; then rm -rf -- "$folder"; fi
}

free_port() {  # sets `port`, the next one that nobody listens on: below those that Linux hands out by itself
  local attempt
  for attempt in {1..200}; do
    port=$((port + 1))
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || return 0
  done
  fail "no free port"
}

write_configuration() {
  local port=$((20000 + RANDOM % 9000)) node host user
  user=$(id -un)
  host=$(uname -n) host=${host%%.*}
  free_port
  {
    cat <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
# How long credentials hold is how long a job that was requeued waits, too: two minutes by default.
AuthInfo=socket=$folder/munge/socket,cred_expire=10
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
# Plain: no cgroups, nothing is bound to CPUs, so that more tasks than CPUs share them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
# A job of the partition urgent takes nodes from those of test, which have a minute to save.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
ReturnToService=2
END
    for ((node = 1; node <= nodes; ++node)); do
      free_port
      echo "NodeName=node$node NodeHostname=$host NodeAddr=127.0.0.$node Port=$port CPUs=4 State=UNKNOWN"
    done
    echo "PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60"
    echo "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2"
  } >"$SLURM_CONF"
  {
    echo "127.0.0.1 localhost $host"
    for ((node = 1; node <= nodes; ++node)); do echo "127.0.0.$node node$node"; done
  } >"$folder/hosts"
}

# start NAME COMMAND...: in a session of its own, with this cluster's sign. Sets `daemon`.
start() {
  local name=$1
  shift
  TESSERAE_SLURM_DAEMON=$name setsid "$@" </dev/null &>"$folder/log/$name.out" &
  daemon=$!
  disown
}

# In namespaces of its own: HOW... NODE COMMAND.... unshare's options for root, and for others.
readonly INSIDE='
  hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs -o mode=1777 slurm_test /dev/shm && shift 2 &&
    exec "$@"'
find_namespaces() {  # sets `namespaces`, empty where there are none to have
  local how
  for how in "--uts --mount" "--user --map-current-user --keep-caps --uts --mount"; do
    read -ra namespaces <<<"unshare $how sh -c"
    if "${namespaces[@]}" "$INSIDE" sh probe "$folder/hosts" true 2>/dev/null; then return; fi
  done
  namespaces=()
}

idle() { slurm sinfo --noheader --Node --partition=test --states=idle --format=%N 2>/dev/null; }
is_up() { [ "$(idle | wc -l)" -eq "$nodes" ]; }
show_logs() {
  local log
  for log in "$folder"/log/*.out; do
    if [ -s "$log" ]; then say "the end of $(basename "$log" .out)'s log:" && tail -n 15 "$log" >&2; fi
  done
}
undo() {
  local status=$?
  trap - EXIT
  trap '' INT TERM HUP
  if [ $status -ne 0 ]; then
    show_logs
    down || true
  fi
  exit $status
}

up() {
  install_missing $SLURM
  down || fail "one that was there does not end"
  [ ! -e "$folder" ] || [ -z "$(ls -A "$folder")" ] || fail "$folder is not empty, and no cluster of ours: take another"
  trap undo EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  umask 077
  mkdir -p "$folder"
  touch "$folder/is-a-slurm-test-cluster"
  mkdir "$folder"/{munge,state,spool,log}
  write_configuration

  head -c 128 /dev/urandom >"$folder/munge/key"
  # --force: nobody else can reach the socket, which is as we want it.
  start munged munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
  munge_answers() { slurm munge --no-input --socket="$folder/munge/socket" --output=/dev/null 2>/dev/null; }
  wait_until "munged that answers" munge_answers || exit 1

  start slurmctld slurmctld -D -i
  controller_answers() { slurm scontrol ping 2>/dev/null | grep -q "is UP"; }
  wait_until "slurmctld that answers" controller_answers || exit 1

  find_namespaces
  local node prefix
  for ((node = 1; node <= nodes; ++node)); do
    prefix=()
    [ ${#namespaces[@]} -eq 0 ] || prefix=("${namespaces[@]}" "$INSIDE" sh "node$node" "$folder/hosts")
    mkdir "$folder/spool/node$node"
    start "node$node" "${prefix[@]}" slurmd -D -N "node$node"
  done
  daemon=''
  wait_until "$nodes nodes that are idle" is_up || exit 1

  say "$nodes nodes are up, $([ ${#namespaces[@]} -eq 0 ] && echo 'all of them this host' || echo 'a host each')"
  echo "export SLURM_CONF=$SLURM_CONF"
  [ ${#namespaces[@]} -gt 0 ] || echo "export MASTER_ADDR=127.0.0.1"
}

install() {
  install=yes
  install_missing $SLURM $MPI
}

status() {
  [ -e "$SLURM_CONF" ] || fail "none is up in $folder"
  slurm scontrol ping || fail "slurmctld does not answer"
  slurm sinfo --Node --long
  slurm squeue
  [ -z "$(slurm sinfo --noheader --dead --format=%N)" ] || fail "not all nodes answer"
}

$verb
