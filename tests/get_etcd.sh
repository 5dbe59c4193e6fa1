#!/bin/sh
# Installs etcd for clusters on this machine where that is allowed; where it is not, says what will not run. Starts no service. Never fails.
command -v etcd >/dev/null 2>&1 && exit 0
log="${TMPDIR:-/tmp}/turtlemq-etcd.log"
# A runlevel of 1 tells Debian's packages that this is no time to start their services.
install() {
  echo "Installing etcd, the name server of clusters (once, a minute or so)"
  "$@" sh -c 'apt-get update -qq; RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends etcd-server' >"$log" 2>&1 && exit 0
  why="apt-get could not install it, see $log"
}
if ! command -v apt-get >/dev/null 2>&1; then
  why="there is no apt-get here to install it with"
elif [ "$(id -u)" = 0 ]; then
  install env
elif sudo -n true 2>/dev/null; then
  install sudo -n
else
  why="it takes root: sudo RUNLEVEL=1 apt-get install --no-install-recommends etcd-server"
fi
echo "No etcd: $why. Without it there is no \`make cluster\`, and the tests of clusters do not run; all others do."
