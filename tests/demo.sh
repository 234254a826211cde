#!/usr/bin/env bash
# Start the server, wait until it serves, stream one answer through gRPC, stop it. Used by `make demo`.
set -euo pipefail
log=$(mktemp)
"$BIN/chairlift" serve --model "$MODEL" --port "$PORT" >"$log" 2>&1 &
server=$!
trap 'kill -TERM $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -f "$log"' EXIT
"$BIN/chairlift" health --target "127.0.0.1:$PORT" --wait 60 &
probe=$!
# The first of the two to end decides: the probe when it has seen SERVING, the server only when it failed.
if ! wait -n "$server" "$probe" || ! kill -0 "$server" 2>/dev/null; then
  kill "$probe" 2>/dev/null || true
  cat "$log" >&2
  exit 1
fi
printf '\n> %s\n\n' "$QUESTION"
"$BIN/chairlift" generate --target "127.0.0.1:$PORT" --temperature 0 --max-tokens 128 "$QUESTION"
