#!/bin/sh
# Installs Debian's Chromium for the tests of pages where that is allowed; says nothing and fails nothing where it is not.
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || exit 0
export DEBIAN_FRONTEND=noninteractive
{ timeout 120 apt-get update -qq && timeout 600 apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1 </dev/null
exit 0
