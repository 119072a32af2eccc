#!/usr/bin/env bash
# Makes the files that a runtime beyond one machine needs; keeps those that are there. See deploy/README.md.
#   deploy/make-files.sh FOLDER NAME_OR_ADDRESS...
set -euo pipefail
umask 077

if [[ $# -lt 2 ]]; then
    echo "usage: $0 FOLDER NAME_OR_ADDRESS..." >&2
    exit 2
fi
folder=$1
shift
mkdir -p "$folder"

if [[ ! -e $folder/cert.pem ]]; then
    names=()
    for name in "$@"; do
        if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then names+=("IP:$name"); else names+=("DNS:$name"); fi
    done
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=pathways \
        -addext "subjectAltName=$(IFS=,; echo "${names[*]}")" \
        -keyout "$folder/key.pem" -out "$folder/cert.pem" 2>/dev/null
fi
[[ -e $folder/token ]] || openssl rand -hex 16 > "$folder/token"
[[ -e $folder/tenants.json ]] || echo '{"tenants": []}' > "$folder/tenants.json"
echo "$folder has cert.pem, key.pem, token, tenants.json"
