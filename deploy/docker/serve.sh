#!/usr/bin/env bash
# Ray's head and the runtime, until this is told to stop. Arguments go to `pathways up`.
#   PATHWAYS_ADDRESS   where clients and other machines reach this one; left out, its first address
#   PATHWAYS_PORT      of the controller; left out, 8476
#   RAY_PORT           of Ray's head, and one beyond of its client server; left out, 6379
#   RAY_AUTH_TOKEN     what lets other machines into the Ray cluster; left out, nobody else
set -euo pipefail

address=${PATHWAYS_ADDRESS:-$(hostname -i | cut -d' ' -f1)}
port=${RAY_PORT:-6379}
ray="$address:$port"
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')}

trap 'pathways down --address "$ray" || true; ray stop' EXIT
trap 'exit 0' INT TERM
ray start --head --node-ip-address="$address" --port="$port" \
    --ray-client-server-port="$((port + 1))" --dashboard-agent-listen-port=0 --include-dashboard=false
pathways up --address "$ray" --bind "$address" --port "${PATHWAYS_PORT:-8476}" "$@"
# The container ends with its Ray, so that it is started again.
while ray health-check --address "$ray" || { sleep 10; ray health-check --address "$ray"; }; do
    sleep 15 &
    wait $!
done
exit 1
