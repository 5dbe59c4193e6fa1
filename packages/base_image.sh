#!/bin/sh
# Makes the base image of deploy/Dockerfile, python:VERSION-slim, of Debian's packages: for machines that reach a Debian mirror and no registry of
# images. Podman has it as localhost/python:VERSION-slim. Needs root; installs podman where there is no container engine. Takes a few minutes.
# Usage: base_image.sh [3.11|3.13|3.14]     (the one of deploy/Dockerfile)
set -e
here=$(cd "$(dirname "$0")/.." && pwd)
version=${1:-$(sed -n 's/^ARG BASE=python:\(.*\)-slim$/\1/p' "$here/deploy/Dockerfile")}
case "$version" in
  3.11) suite=bookworm ;;
  3.13) suite=trixie ;;
  3.14) suite=forky ;;
  *) echo "No release of Debian has Python $version as its own. Name 3.11, 3.13 or 3.14." >&2; exit 2 ;;
esac
[ "$(id -u)" = 0 ] || { echo "It takes root: sudo sh packages/base_image.sh $version" >&2; exit 1; }
packages=
command -v mmdebstrap >/dev/null || packages="$packages mmdebstrap"
if docker info >/dev/null 2>&1; then
  engine=docker
else
  engine=podman
  for name in podman runc iptables; do command -v "$name" >/dev/null || packages="$packages $name"; done
fi
if [ -n "$packages" ]; then
  echo "Installing$packages"
  apt-get update -qq
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
image=python:$version-slim
mirror=${MIRROR:-$(apt-get indextargets --format '$(SITE)' | grep -v security | head -n 1)}  # the one that this machine uses
[ -n "$mirror" ] || { echo "Name a mirror of Debian: MIRROR=ADDRESS sh packages/base_image.sh $version" >&2; exit 2; }
echo "Making $image of Debian $suite (a few minutes)"
mmdebstrap --quiet --variant=essential --include=passwd,libstdc++6,python3,python3-venv,ca-certificates --dpkgopt='path-exclude=/usr/share/doc/*' \
  --aptopt='Acquire::Check-Valid-Until "false"' "$suite" "$folder/base.tar" "$mirror" 2>"$folder/log" || { tail -n 20 "$folder/log" >&2; exit 1; }
"$engine" import "$folder/base.tar" "$image" >/dev/null
[ "$engine" = docker ] || image=localhost/$image
starts() { "$engine" run --rm "$image" python3 --version; }
# A machine that is itself a container with old cgroups, or without the right to raise limits, needs runc and limits of its own.
settings=/etc/containers/containers.conf.d/turtlemq.conf
if [ "$engine" = podman ] && ! starts >/dev/null 2>&1; then
  mkdir -p "${settings%/*}"
  printf '[engine]\nruntime = "runc"\n[containers]\ndefault_ulimits = ["nofile=%s:%s", "nproc=4096:4096"]\n' "$(ulimit -Hn)" "$(ulimit -Hn)" >"$settings"
  echo "podman starts no container with its own settings here; those that it needs are in $settings"
fi
echo "$image: $(starts)"
