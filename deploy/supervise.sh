#!/usr/bin/env bash
# Runs a server that nothing else supervises, and restarts it whenever it ends, whatever its status: vLLM 0.32 ends
# with 0 even if its worker was killed.
#
#   deploy/supervise.sh vllm serve MODEL --attention-backend hybrid_sparse …
#
# On SIGTERM, SIGINT or SIGHUP the server gets SIGTERM and is not restarted; its status is this script's. A terminal that
# closes sends SIGHUP: write `nohup` in front of this script to let it go on. The pause before a restart is 1 s, and
# doubles up to LONGEST_PAUSE_S (300) for a server that ends within SETTLED_S (60) seconds each time.
set -u

(($#)) || { echo "supervise: needs the server's command line" >&2; exit 2; }

readonly SETTLED_S=${SETTLED_S:-60} LONGEST_PAUSE_S=${LONGEST_PAUSE_S:-300}
child= told=

stop() { told=yes; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null; }
trap stop TERM INT HUP

start() { # a signal that comes before the pid is known is passed on afterwards
  "$@" &
  child=$!
  [[ -z $told ]] || stop
}

pause_s=1
while [[ -z $told ]]; do
  begun=$SECONDS
  start "$@"
  while :; do # a signal ends `wait` early, with a status that is not the server's
    wait "$child"
    status=$?
    kill -0 "$child" 2>/dev/null || break
  done
  child=
  [[ -z $told ]] || exit "$status"
  lived_s=$((SECONDS - begun))
  ((lived_s < SETTLED_S)) || pause_s=1
  echo "supervise: the server ended with status $status after $lived_s s; starting it again in $pause_s s" >&2
  start sleep "$pause_s"
  wait "$child"
  child=
  pause_s=$((pause_s * 2 < LONGEST_PAUSE_S ? pause_s * 2 : LONGEST_PAUSE_S))
done
