#!/bin/sh
# Installs Chromium for tests/test_pages.py where that is allowed; where it is not, says what will not run. Never fails.
for name in chromium chromium-browser google-chrome google-chrome-stable; do
  command -v "$name" >/dev/null 2>&1 && exit 0
done
log="${TMPDIR:-/tmp}/turtlemq-browser.log"
install() {
  echo "Installing Chromium for the tests of the pages (once, a minute or so)"
  "$@" sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium' >"$log" 2>&1 && exit 0
  why="apt-get could not install it, see $log"
}
if ! command -v apt-get >/dev/null 2>&1; then
  why="there is no apt-get here to install it with"
elif [ "$(id -u)" = 0 ]; then
  install env
elif sudo -n true 2>/dev/null; then
  install sudo -n
else
  why="it takes root: sudo apt-get install chromium"
fi
echo "No Chromium: $why. The browser tests of tests/test_pages.py do not run; all others do."
