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
made=$(mktemp -d "$folder/.made.XXXXXX")  # what is not whole gets no name that a later run would keep
trap 'rm -rf "$made"' EXIT

if [[ ! -e $folder/cert.pem ]]; then
    names=()
    for name in "$@"; do
        if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then names+=("IP:$name"); else names+=("DNS:$name"); fi
    done
    if ! openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=pathways \
        -addext "subjectAltName=$(IFS=,; echo "${names[*]}")" \
        -keyout "$made/key.pem" -out "$made/cert.pem" 2> "$made/said"; then
        cat "$made/said" >&2
        echo "$0: openssl has made no certificate for $*; nothing in $folder has changed" >&2
        exit 1
    fi
    mv "$made/key.pem" "$made/cert.pem" "$folder"
else
    there=$(openssl x509 -in "$folder/cert.pem" -noout -ext subjectAltName | tail -n +2 | xargs)
    echo "kept $folder/cert.pem, which is for $there; to have another one, remove it first"
fi
if [[ ! -e $folder/token ]]; then
    openssl rand -hex 16 > "$made/token" || { echo "$0: openssl has made no token" >&2; exit 1; }
    mv "$made/token" "$folder"
fi
[[ -e $folder/tenants.json ]] || echo '{"tenants": []}' > "$folder/tenants.json"
echo "$folder has cert.pem, key.pem, token, tenants.json"
