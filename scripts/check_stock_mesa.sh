#!/usr/bin/env bash
# Runs device tests on Debian 12's own Mesa (22.3), unpacked beside whatever is installed. It is slow,
# and its tokens must be right all the same. The op tests and the tiny models run, or what TESTS names;
# arguments go to pytest. Nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

on_debian_12 || die "this check is about Debian 12's own Mesa"
version=$(apt-cache madison mesa-vulkan-drivers | awk '$3 ~ /^22\.3/ { print $3; exit }')
[ -n "$version" ] || die "apt knows no mesa-vulkan-drivers 22.3; run: apt-get update"

folder=$PWD/.cache/stock-mesa-$version
library=$folder/usr/lib/$(dpkg-architecture -q DEB_HOST_MULTIARCH 2>/dev/null || echo x86_64-linux-gnu)
if [ ! -e "$folder/icd.json" ]; then
  say "Fetching mesa-vulkan-drivers $version and what it needs"
  mkdir -p "$folder/debs"
  needed=("mesa-vulkan-drivers=$version")
  for package in $(apt-cache show "mesa-vulkan-drivers=$version" | sed -n 's/^Depends: //p' |
    tr ',' '\n' | sed 's/ *[(|].*//' | grep -v python3); do
    has_package "$package" || needed+=("$package")
  done
  (cd "$folder/debs" && apt-get download -q "${needed[@]}")
  for file in "$folder"/debs/*.deb; do
    dpkg -x "$file" "$folder"
  done
  printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.230"}}\n' \
    "$library/libvulkan_lvp.so" >"$folder/icd.json"
fi

export LD_LIBRARY_PATH="$library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export VK_DRIVER_FILES="$folder/icd.json" VK_ICD_FILENAMES="$folder/icd.json"
export MESA_SHADER_CACHE_DIR="$folder/shaders" HORNITO_CACHE="$folder/cache"
export HORNITO_REQUIRE_DEVICE=1 HORNITO_DEVICE=software

python=${PYTHON:-.venv/bin/python}
"$python" - <<'END'
from hornito.vk.device import list_devices

(device,) = list_devices()
print(f"{device.name}, {device.driver_name} {device.driver_info}")
assert "22.3" in device.driver_info, "this is not the stock driver"
assert device.usable, device.reason
END
# shellcheck disable=SC2086 # a list of paths
exec "$python" -m pytest -m gpu ${TESTS:-tests/ops tests/runtime tests/e2e/test_tiny_llama.py} "$@"
