#!/bin/sh
# Installs the peers of the benchmarks: Debian's packages where that is allowed, and BullMQ from npm beside this file.
# Starts and stops no service. What cannot be installed is named, with the command that would do it; its column stays empty. Never fails.
cd "$(dirname "$0")" || exit 1
PATH="$PATH:/usr/sbin"
log="${TMPDIR:-/tmp}/turtlemq-peers.log"
: >"$log"

wanted=
need() { # package, and a program of it
  command -v "$2" >/dev/null 2>&1 || wanted="$wanted $1"
}
need redis-server redis-server
need beanstalkd beanstalkd
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || need postgresql postgres
need nodejs node
need npm npm

# A runlevel of 1 tells Debian's packages that this is no time to start their services.
install() {
  echo "Installing$wanted (once, a minute or so)"
  # shellcheck disable=SC2086
  "$@" sh -c 'apt-get update -qq; RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"' apt $wanted >>"$log" 2>&1 ||
    echo "apt-get could not install all of:$wanted (see $log)"
}
if [ -z "$wanted" ]; then
  :
elif ! command -v apt-get >/dev/null 2>&1; then
  echo "There is no apt-get here. Install these with what there is:$wanted"
elif [ "$(id -u)" = 0 ]; then
  install env
elif sudo -n true 2>/dev/null; then
  install sudo -n
else
  echo "It takes root: sudo RUNLEVEL=1 apt-get install --no-install-recommends$wanted"
fi

if command -v npm >/dev/null 2>&1; then
  [ -d bullmq/node_modules/bullmq ] && [ bullmq/node_modules -nt bullmq/package.json ] || {
    echo "Installing BullMQ with npm"
    (cd bullmq && npm install --no-package-lock --no-audit --no-fund --ignore-scripts && touch node_modules) >>"$log" 2>&1 ||
      echo "npm could not install BullMQ (see $log): cd $(pwd)/bullmq && npm install --no-package-lock"
  }
else
  echo "No npm: BullMQ is not installed."
fi
exit 0
