#!/usr/bin/env bash
# Start the server, wait until it serves, stream one answer through gRPC, stop it. Used by `make demo`.
set -euo pipefail
log=$(mktemp)
"$BIN/chairlift" serve --model "$MODEL" --port "$PORT" >"$log" 2>&1 &
server=$!
trap 'kill -TERM $server 2>/dev/null; wait $server 2>/dev/null; rm -f "$log"' EXIT
if ! "$BIN/chairlift" health --target "127.0.0.1:$PORT" --wait 60; then
  cat "$log" >&2
  exit 1
fi
printf '\n> %s\n\n' "$QUESTION"
"$BIN/chairlift" generate --target "127.0.0.1:$PORT" --temperature 0 --max-tokens 128 "$QUESTION"
