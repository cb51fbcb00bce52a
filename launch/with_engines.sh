#!/usr/bin/env bash
# Engines and trainer on one machine; they end together. Arguments go to train.py:
#   ENGINE='vllm serve hf --port {port} --enable-return-routed-experts' launch/with_engines.sh rollouts=vllm ...
# ENGINE   the command of one engine; {port} and {number} (0, 1, ...) are replaced
# ENGINES  how many (1), at ports from PORT (8000) on
# ENGINE_WAIT_SECONDS  until all of them answer /health (1800)
# Engine N writes engine-N.log in the working directory. The exit code is the trainer's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command=${ENGINE:?ENGINE is the command of one engine}
count=${ENGINES:-1}
first=${PORT:-8000}
patience=${ENGINE_WAIT_SECONDS:-1800}
engines=()
trainer=

# shellcheck disable=SC2329
end_engines() { # each with all its processes
    for pid in "${engines[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
    for _ in {1..50}; do
        alive=0
        for pid in "${engines[@]}"; do kill -0 -- "-$pid" 2>/dev/null && alive=1; done
        ((alive)) || return 0
        sleep 0.2
    done
    for pid in "${engines[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}
# shellcheck disable=SC2329
pass_on() { # to the trainer, which saves; before it runs, everything ends
    [ -n "$trainer" ] || exit $((128 + $(kill -l "$1")))
    kill -"$1" "$trainer" 2>/dev/null || true
}
trap end_engines EXIT
trap 'pass_on TERM' INT TERM # a background process ignores SIGINT
trap 'pass_on USR1' USR1

urls=()
for ((number = 0; number < count; number++)); do
    port=$((first + number))
    line=${command//\{port\}/$port}
    setsid bash -c "exec ${line//\{number\}/$number}" >"engine-$number.log" 2>&1 &
    engines+=($!)
    urls+=("http://127.0.0.1:$port")
done

ask='import sys, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(sys.argv[1] + "/health", timeout=5)'
deadline=$((SECONDS + patience))
for ((number = 0; number < count; number++)); do
    until "$python" -c "$ask" "${urls[$number]}" 2>/dev/null; do
        reason=
        kill -0 "${engines[$number]}" 2>/dev/null || reason="ended before it answered /health"
        ((SECONDS < deadline)) || reason="did not answer /health within $patience seconds"
        if [ -n "$reason" ]; then
            echo "engine $number $reason; the end of engine-$number.log:" >&2
            tail -n 20 "engine-$number.log" >&2
            exit 1
        fi
        sleep 0.5
    done
done

list=$(IFS=, && echo "${urls[*]}")
"$python" "$root/train.py" "rollouts.urls=[$list]" "$@" &
trainer=$!
code=0
while kill -0 "$trainer" 2>/dev/null; do # a signal ends `wait`, not the trainer
    code=0
    wait "$trainer" || code=$?
done
exit "$code"
