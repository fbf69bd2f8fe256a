#!/bin/sh
# Installs Debian's Chromium for the tests of pages where that is allowed. Fails nothing where it is not, but says that they will be skipped.
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
without() {
    echo "tests/browser will be skipped: there is no Chromium, and $1. Get one with: python -m playwright install chromium" >&2
    exit 0
}
[ "$(id -u)" = 0 ] || without "only root can install Debian's"
command -v apt-get >/dev/null 2>&1 || without "there is no apt-get to install it with"
export DEBIAN_FRONTEND=noninteractive
{ timeout 120 apt-get update -qq && timeout 600 apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1 </dev/null ||
    without "apt-get could not install it"
