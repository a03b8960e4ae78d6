#!/usr/bin/env bash
# Prune a corpus by a job array, in PARTS parts; every task is a run on one node, with a Ray of its own:
#   PARTS=64 SBATCH_GPUS_PER_NODE=8 SBATCH_TIMELIMIT=12:00:00 jobs/cluster/slurm.sh VIDEOS --out CACHE --model MODEL
# Only parts with videos to do are submitted: the same command again, after nodes or a night were lost, does the rest.
#SBATCH --job-name=gstep-prune
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=gstep-prune-%A_%a.log
#SBATCH --signal=B:TERM@120
set -uo pipefail

if [[ -z ${SLURM_JOB_ID:-} ]]; then # not in a job yet: submit
  : "${PARTS:?how many parts: as many as nodes, or a few times that}"
  [[ $PARTS =~ ^[1-9][0-9]*$ ]] || { echo "PARTS must be a whole number above 0, got $PARTS" >&2 && exit 2; }
  left() { # PART ARGUMENT...: prints PART if there are videos of it to do, or may be in tars that no run has read yet
    local forecast
    if ! forecast=$(python -m jobs.prune "${@:2}" --shard "$1/$PARTS" --join --dry-run --json); then
      grep -q 'none of the [0-9]* videos are in it' <<<"$forecast" && return # other parts have them all
      return 255
    fi
    grep -q '"n_todo": 0,' <<<"$forecast" && grep -q '"unlisted": \[\]' <<<"$forecast" || echo "$1"
  }
  export -f left
  todo=$(seq 0 $((PARTS - 1)) | xargs -P 4 -I{} bash -c 'left "$@"' bash {} "$@") || exit 2
  if [[ -z $todo ]]; then
    echo "nothing is left to do"
    exit 0
  fi
  exec sbatch --export=ALL --array="$(sort -n <<<"$todo" | paste -sd,)" "$0" "$@"
fi

export RAY_ADDRESS=local
# Two minutes before the time limit this script gets SIGTERM and hands it to the run, which writes what is encoded. No
# step (srun): Slurm would send the signal to all of its processes, and Ray's end at once.
driver='' terminated=''
trap 'terminated=1; [[ -z $driver ]] || kill -TERM "$driver"' TERM
python -m jobs.prune "$@" --shard "$SLURM_ARRAY_TASK_ID/$PARTS" --join &
driver=$!
[[ -z $terminated ]] || kill -TERM "$driver" # the signal came before the trap knew the run
# 143: the signal ended the wait, and not the run, unless it came before the run could handle it.
while wait "$driver"; code=$?; ((code == 143)) && kill -0 "$driver" 2>/dev/null; do :; done
# 130 and 143: stopped, so it goes on; 1: failed, so it is tried three times in all; 2: refused, which no other node
# changes.
if ((code == 130 || code == 143 || (code != 0 && code != 2 && ${SLURM_RESTART_COUNT:-0} < 2))); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
