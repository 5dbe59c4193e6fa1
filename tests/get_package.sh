#!/bin/sh
# Installs a Debian package that some tests use, where that is allowed; where it is not, says what will not run. Starts no service. Never fails.
# Usage: get_package.sh etcd-server|chromium
case "$1" in
  etcd-server)
    names="etcd" what="etcd, the name server of clusters"
    without="Without it there is no \`make cluster\`, and the tests of clusters do not run; all others do." ;;
  chromium)
    names="chromium chromium-browser google-chrome google-chrome-stable" what="Chromium for the tests of the pages"
    without="The browser tests of tests/test_pages.py do not run; all others do." ;;
  *)
    echo "Usage: $0 etcd-server|chromium" >&2
    exit 2 ;;
esac
for name in $names; do
  command -v "$name" >/dev/null 2>&1 && exit 0
done
log="${TMPDIR:-/tmp}/turtlemq-$1.log"
# A runlevel of 1 tells Debian's packages that this is no time to start their services.
command="apt-get update -qq; RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $1"
install() {
  echo "Installing $what (once, a minute or so)"
  "$@" sh -c "$command" >"$log" 2>&1 && exit 0
  why="apt-get could not install it, see $log"
}
if ! command -v apt-get >/dev/null 2>&1; then
  why="there is no apt-get here to install it with"
elif [ "$(id -u)" = 0 ]; then
  install env
elif sudo -n true 2>/dev/null; then
  install sudo -n
else
  why="it takes root: sudo RUNLEVEL=1 apt-get install --no-install-recommends $1"
fi
echo "No $1: $why. $without"
