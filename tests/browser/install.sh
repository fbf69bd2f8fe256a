#!/bin/sh
# The Debian package that tests need and pip does not bring: a Chromium for those of pages.
# Fails nothing where it may not install it, but says that tests will be skipped.
missing=""
found=""
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && found="$name"
done
[ -n "$found" ] || [ -n "$SAGE_GRPO_CHROMIUM" ] || missing="chromium"
[ -n "$missing" ] || exit 0
without() {
    echo "Tests that need $missing will be skipped; $1." >&2
    exit 0
}
[ "$(id -u)" = 0 ] || without "only root can install Debian's package (a browser for one user: python -m playwright install chromium)"
command -v apt-get >/dev/null 2>&1 || without "there is no apt-get to install it with"
export DEBIAN_FRONTEND=noninteractive
{ timeout 120 apt-get update -qq && timeout 600 apt-get install -qq -y --no-install-recommends "$missing"; } >/dev/null 2>&1 </dev/null ||
    without "apt-get could not install it"
