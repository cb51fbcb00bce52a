#!/usr/bin/env bash
# Engines and trainer on one machine; they end together. Arguments go to train.py:
#   ENGINE='vllm serve hf --port {port} --enable-return-routed-experts' launch/with_engines.sh rollouts=vllm ...
# ENGINE   the command of one engine; {port} and {number} (0, 1, ...) are replaced
# ENGINES  how many (1), at ports from PORT (8000) on
# ENGINE_WAIT_SECONDS  until all of them answer /health (1800)
# Engine N writes engine-N.log in the working directory. The exit code is the trainer's. Several nodes: launch/slurm.sbatch.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
. "$root/launch/common.sh"
: "${ENGINE:?ENGINE is the command of one engine}"
find_python "$root"
trainer=

# shellcheck disable=SC2329
pass_on() { # to the trainer, which saves; before it runs, everything ends
    [ -n "$trainer" ] || exit $((128 + $(kill -l "$1")))
    kill -"$1" "$trainer" 2>/dev/null || true
}
engines=()
trap end_engines EXIT
trap 'pass_on TERM' INT TERM # a background process ignores SIGINT
trap 'pass_on USR1' USR1

start_engines engine
deadline=$((SECONDS + ${ENGINE_WAIT_SECONDS:-1800}))
mapfile -t urls < <(urls_of 127.0.0.1)
for number in "${!urls[@]}"; do
    if ! await_engine "${urls[$number]}" "${engines[$number]}" "$deadline"; then
        echo "engine $number $reason; the end of engine-$number.log:" >&2
        tail -n 20 "engine-$number.log" >&2
        exit 1
    fi
done

list=$(IFS=, && echo "${urls[*]}")
"${python[@]}" "$root/train.py" "rollouts.urls=[$list]" "$@" &
trainer=$!
code=0
while kill -0 "$trainer" 2>/dev/null; do # a signal ends `wait`, not the trainer
    code=0
    wait "$trainer" || code=$?
done
exit "$code"
