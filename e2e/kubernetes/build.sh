#!/bin/sh
# Puts the one binary of this folder at OUT: a prebuilt copy beside the repository if there is one, else built with Go.
# Usage: build.sh OUT [--from-source]
set -eu
out=$1 from_source=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$(dirname "$out")"
out=$(cd "$(dirname "$out")" && pwd)/$(basename "$out")
part=$out.$$
trap 'rm -f "$part"' EXIT

machine=$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/')
version=$(sed -n 's|^\tk8s.io/kubernetes ||p' "$here/go.mod")
prebuilt=$here/../../../shared/k8s/kubernetes-${version#v}-linux-$machine.xz
if [ -z "$from_source" ] && [ -f "$prebuilt" ] && command -v xz >/dev/null; then
  xz -dc "$prebuilt" >"$part"
elif command -v go >/dev/null; then
  minor=$(echo "$version" | cut -d. -f2)
  info=k8s.io/component-base/version
  cd "$here"
  CGO_ENABLED=0 go build -trimpath -o "$part" -ldflags \
    "-s -w -X $info.gitVersion=$version -X $info.gitMajor=1 -X $info.gitMinor=$minor" .
else
  echo "build.sh: no Go to build Kubernetes with; install Go 1.25 or newer" >&2
  exit 1
fi
chmod 755 "$part"
mv "$part" "$out"
