#!/usr/bin/env bash
# From a bare machine to a real model's answer on a Vulkan device: installs, fetches
# SmolLM2-135M-Instruct, compiles it into one file and streams an answer. Uses the GPU whose Vulkan
# driver is installed, else Mesa's software device.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

ensure_vulkan demo
install_project

say "Devices"
.venv/bin/hornito devices

model=$(fetch_smollm2 .cache)
package=.cache/smollm2-135m-instruct.vxm

say "hornito compile $model $package"
.venv/bin/hornito compile "$model" "$package"

prompt="What is the capital of France?"
say "hornito run $package \"$prompt\" --stats"
.venv/bin/hornito run "$package" "$prompt" --max-tokens 64 --stats

say "Now talk to it"
cat <<END
  . .venv/bin/activate
  hornito chat $package
The model's source is $model; docs/quickstart.md goes on from here.
END
