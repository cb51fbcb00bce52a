# shellcheck shell=bash
# Shared by the launch scripts, which source this file from the project's directory.

# Set `python` (an array: a container's command has several words) to $PYTHON, else the project's own, else the active one.
find_python() {
    local root=$1
    if [ -n "${PYTHON:-}" ]; then
        read -ra python <<<"$PYTHON"
    elif [ -x "$root/.venv/bin/python" ]; then
        python=("$root/.venv/bin/python")
    elif command -v python3 >/dev/null && python3 -c '
import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in ("hydra", "lightning", "torch")))'; then
        python=("$(command -v python3)")
    else
        echo "launch: no Python with this project's packages: $root/.venv does not exist, and the active python3 lacks them:" >&2
        echo "  run make train once, activate an environment with olmo_rl, or set PYTHON=/path/to/python" >&2
        exit 2
    fi
    if ! command -v "${python[0]}" >/dev/null; then
        echo "launch: PYTHON=${PYTHON:-} is no program: set it to the interpreter of an environment with olmo_rl" >&2
        exit 2
    fi
}

# Print a free port for job number $1: several jobs share a node. The one of its number even where this host has no Python, but a
# container has. Other candidates lie far from those of the jobs beside it, which look at the same moment.
port_of() {
    local port
    port=$("${python[@]}" -c '
import socket, sys
for attempt in range(100):
    port = 15000 + (int(sys.argv[1]) + 997 * attempt) % 10000
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            continue
    break
print(port)' "$1" 2>/dev/null) || port=
    echo "${port:-$((15000 + $1 % 10000))}"
}

# Run a command in the background and wait for it; `code` is its exit code. Signals named in $1 are passed on to it.
run_and_forward() {
    local signals=$1 child
    shift
    "$@" &
    child=$!
    for name in $signals; do
        # shellcheck disable=SC2064  # now
        trap "kill -s $name $child 2>/dev/null || true" "$name"
    done
    while :; do
        code=0
        # shellcheck disable=SC2034  # the caller reads it
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null || break # else a signal ended the wait, not the command
    done
    for name in $signals; do
        trap - "$name"
    done
}

# Print the ends of the logs that name a failure, of three ranks at most; rank 0 wrote to the terminal.
show_failures() {
    local logs=$1 file
    [ -d "$logs" ] || return 0
    while IFS= read -r file; do
        echo "--- the end of $file:" >&2
        tail -n 25 "$file" >&2
    done < <(grep -l -s -E 'Traceback|refused|Fatal|not moved' "$logs"/rank-*.log | head -n 3)
    echo "logs of the other ranks: $logs" >&2
}

# Start $ENGINES (1) engines of this host at ports from $PORT (8000) on, each in a process group of its own: $ENGINE with {port} and
# {number} replaced. `engines`: their process groups. Engine N writes $1-N.log.
start_engines() {
    local log=$1 number port line
    engines=()
    for ((number = 0; number < ${ENGINES:-1}; number++)); do
        port=$((${PORT:-8000} + number))
        line=${ENGINE//\{port\}/$port}
        setsid bash -c "exec ${line//\{number\}/$number}" >"$log-$number.log" 2>&1 &
        engines+=($!)
    done
}

# Print the addresses of the engines of a host.
urls_of() {
    local host=$1 number
    for ((number = 0; number < ${ENGINES:-1}; number++)); do
        echo "http://$host:$((${PORT:-8000} + number))"
    done
}

# End all processes of `engines`: SIGTERM, and after ten seconds SIGKILL.
end_engines() {
    local pid alive
    for pid in "${engines[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
    for _ in {1..50}; do
        alive=0
        for pid in "${engines[@]}"; do kill -0 -- "-$pid" 2>/dev/null && alive=1; done
        ((alive)) || return 0
        sleep 0.2
    done
    for pid in "${engines[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}

# Wait until the engine at address $1, of process $2, answers /health before SECONDS is $3; else return 1 with the reason in `reason`.
# shellcheck disable=SC2034  # the caller reads it
await_engine() {
    local url=$1 pid=$2 deadline=$3
    local ask='import sys, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(sys.argv[1] + "/health", timeout=5)'
    until "${python[@]}" -c "$ask" "$url" 2>/dev/null; do
        reason="ended before it answered /health"
        kill -0 "$pid" 2>/dev/null || return 1
        reason="did not answer /health within ${ENGINE_WAIT_SECONDS:-1800} seconds"
        ((SECONDS < deadline)) || return 1
        sleep 0.5
    done
}
