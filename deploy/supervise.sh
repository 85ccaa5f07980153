#!/usr/bin/env bash
# Runs a server where nothing else watches over it, and starts it again whenever it ends, whatever its status: vLLM
# 0.32 ends with 0 even where its worker was killed.
#
#   deploy/supervise.sh vllm serve MODEL --attention-backend hybrid_sparse …
#
# SIGTERM and SIGINT go to the server, which is not started again then; its status is this script's. A server that ended
# within SETTLED_S (60) seconds is started again after a pause that doubles from 1 s to LONGEST_PAUSE_S (300).
set -u

(($#)) || { echo "supervise: needs the server's command line" >&2; exit 2; }

readonly SETTLED_S=${SETTLED_S:-60} LONGEST_PAUSE_S=${LONGEST_PAUSE_S:-300}
child= told=

stop() { told=yes; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null; }
trap stop TERM INT

pause_s=1
while [[ -z $told ]]; do
  begun=$SECONDS
  "$@" &
  child=$!
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
  sleep "$pause_s" &
  child=$!
  wait "$child"
  child=
  pause_s=$((pause_s * 2 < LONGEST_PAUSE_S ? pause_s * 2 : LONGEST_PAUSE_S))
done
