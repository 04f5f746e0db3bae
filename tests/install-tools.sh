#!/usr/bin/env bash
# Installs what tests with peers (`peers`), those in a Kubernetes cluster (`cluster`), the lints (`lint`), the fuzz targets (`fuzz`) or the
# mutants (`mutants`) need beside cargo, if it is missing:
#   prometheus, promtool   Debian's package, unpacked under target/tools: no service is started, root is not needed
#   alertmanager, amtool   likewise
#   buildah, debootstrap, sqlite3, chromium   Debian's packages, installed (as root, or through sudo)
#   a Debian base image    by debootstrap, kept in target/tools/containers (as root only)
#   helm, cargo-deny, cargo-fuzz, cargo-mutants   from the Go and Rust registries, pinned in tests/tools.env, under
#                          target/tools
#   otelcol, prometheus-3  an OpenTelemetry Collector and a Prometheus that accept OTLP, built from Go's module proxy
#   dashboard-linter       the linter of Grafana's dashboards, likewise, where the proxy offers it
#   axe-core               the accessibility checker, from the npm registry, likewise
#   mypy, ruff, setuptools the client's types, its lint and its wheel, from PyPI, in a virtual environment under target/tools
#   torch and others       PyTorch, torchvision, Lightning, transformers and JAX, likewise in one of their own: 3 GB to
#                          fetch, because PyPI has no PyTorch without CUDA
#   kubernetes             (`cluster`) Kubernetes as one program, of its own Go module; containerd, runc, the plugins of the pods'
#                          network and busybox, Debian's packages unpacked beside it
#   kubelet-podresources   the kubelet's PodResources service, tests/kubelet with Kubernetes' own package, likewise
#
# A tool that cannot be installed is reported and left out. The tests that need it then skip with a message, and fail if
# CI is set. So this script fails only if CI is set.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/tools.env
source tests/tools.env
tools=$PWD/target/tools
mkdir -p "$tools"
missing=()

note() { printf 'tools: %s\n' "$*" >&2; }
have() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null; }

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif have sudo && sudo -n true 2>/dev/null; then
        sudo "$@"
    else
        return 1
    fi
}

# The package lists of a fresh machine are empty.
apt_refresh() {
    have apt-get && as_root apt-get update -qq
}

# Unpacks Debian's package $1 under target/tools/$2.
unpack_from_debian() {
    note "unpacking Debian's $1"
    have apt-get || return 1
    local packages=$tools/packages
    mkdir -p "$packages" "$tools/$2"
    (cd "$packages" && { apt-get download -qq "$1" || { apt_refresh && apt-get download -qq "$1"; }; }) &&
        dpkg -x "$packages/$1"_*.deb "$tools/$2" &&
        rm -rf "$packages"
}

prometheus_from_debian() {
    if [ -x "$tools/prometheus/usr/bin/promtool" ]; then return; fi
    if have prometheus && have promtool; then return; fi
    unpack_from_debian prometheus prometheus
}

alertmanager_from_debian() {
    if [ -x "$tools/alertmanager/usr/bin/amtool" ]; then return; fi
    if have prometheus-alertmanager && have amtool; then return; fi
    unpack_from_debian prometheus-alertmanager alertmanager
}

debian_packages() {
    local wanted=()
    for package in "$@"; do have "$package" || wanted+=("$package"); done
    if [ ${#wanted[@]} = 0 ]; then return; fi
    have apt-get || return 1
    note "installing Debian's ${wanted[*]}"
    local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}")
    as_root "${install[@]}" >&2 || { apt_refresh && as_root "${install[@]}" >&2; }
}

helm_from_go() {
    local bin=$tools/helm-$HELM_VERSION
    if [ -x "$bin/helm" ]; then return; fi
    have go || { note "helm is built by go, which is not here"; return 1; }
    note "building helm $HELM_VERSION (a few minutes, once)"
    GOBIN=$bin go install -ldflags='-s -w' "helm.sh/helm/v4/cmd/helm@v$HELM_VERSION"
}

# Downloads the Go module $1 (PATH@VERSION) and prints the folder of its source; fails where the proxy does not offer it.
module_source() (
    cd "$tools" && go mod download -json "$1" | sed -n 's/^\t"Dir": "\(.*\)",\{0,1\}$/\1/p' | grep .
)

# The collector's builder writes a program of the modules that tests/otelcol/builder.yaml names, and go compiles it. By
# default the builder first tidies the program's go.mod, which would fetch modules that only tests need.
otelcol_from_go() {
    local bin=$tools/otelcol-$OTELCOL_VERSION work
    if [ -x "$bin/otelcol" ]; then return; fi
    have go || { note "the collector is built by go, which is not here"; return 1; }
    note "building the OpenTelemetry Collector $OTELCOL_VERSION (two minutes, once)"
    work=$(mktemp -d -p "$tools") &&
        sed -e "s/\$OTELCOL_VERSION/$OTELCOL_VERSION/" -e "s/\$OTELCOL_CONTRIB_VERSION/$OTELCOL_CONTRIB_VERSION/" \
            -e "s/\$OTELCOL_CONFMAP_VERSION/$OTELCOL_CONFMAP_VERSION/" -e "s|^dist:|&\n  output_path: $work/source|" \
            tests/otelcol/builder.yaml >"$work/builder.yaml" &&
        GOBIN=$work go install -buildvcs=false "go.opentelemetry.io/collector/cmd/builder@v$OTELCOL_VERSION" &&
        compile_otelcol "$work" "$bin/otelcol" >"$tools/otelcol.log" 2>&1 &&
        rm -rf "$work" ||
        { note "target/tools/otelcol.log says why"; return 1; }
}

compile_otelcol() (
    "$1/builder" --skip-get-modules --skip-compilation --config "$1/builder.yaml" &&
        cd "$1/source" && go mod init otelcol &&
        sed -n 's/.*gomod: \(.*\) \(v.*\)/\1@\2/p' ../builder.yaml |
        xargs go get "go.opentelemetry.io/collector/otelcol@v$OTELCOL_VERSION" &&
        CGO_ENABLED=0 go build -mod=mod -buildvcs=false -ldflags='-s -w' -o "$2" .
)

# `go install` refuses a module with replace directives, so this builds in a copy of the module, as its own project
# does, without its web pages, which the module does not contain, and without most service discoveries and their SDKs.
prometheus_3_from_go() {
    local bin=$tools/prometheus-$PROMETHEUS_3_VERSION work source
    if [ -x "$bin/prometheus-3" ]; then return; fi
    have go || { note "Prometheus 3 is built by go, which is not here"; return 1; }
    note "building Prometheus $PROMETHEUS_3_VERSION (two minutes, once)"
    work=$(mktemp -d -p "$tools") &&
        source=$(module_source "github.com/prometheus/prometheus@$PROMETHEUS_3_MODULE") &&
        cp -r "$source/." "$work" && chmod -R u+w "$work" &&
        (cd "$work" && GOWORK=off go build -buildvcs=false -tags netgo,remove_all_sd \
            -ldflags="-s -w -X github.com/prometheus/common/version.Version=$PROMETHEUS_3_VERSION" \
            -o "$bin/prometheus-3" ./cmd/prometheus) &&
        rm -rf "$work"
}

# The kubelet's PodResources service, of tests/kubelet and Kubernetes' own package.
kubelet_from_go() {
    local bin=$tools/kubelet-$KUBELET_VERSION work
    if [ "$bin/kubelet-podresources" -nt tests/kubelet/main.go ]; then return; fi
    have go || { note "the kubelet's service is built by go, which is not here"; return 1; }
    note "building the kubelet's service $KUBELET_VERSION (half a minute, once)"
    work=$(mktemp -d -p "$tools") &&
        cp tests/kubelet/main.go "$work" &&
        (cd "$work" && go mod init kubelet && go get "k8s.io/kubelet@v$KUBELET_VERSION" && go mod tidy &&
            CGO_ENABLED=0 go build -buildvcs=false -ldflags='-s -w' -o "$bin/kubelet-podresources" .) >"$tools/kubelet.log" 2>&1 &&
        rm -rf "$work" ||
        { note "target/tools/kubelet.log says why"; return 1; }
}

# Kubernetes' module replaces its parts by folders of its repository, which the module does not contain: the same parts are published as
# modules of their own.
kubernetes_from_go() {
    local bin=$tools/kubernetes-$KUBERNETES_VERSION work
    if [ "$bin/kubernetes" -nt tests/kubernetes/main.go ] && [ "$bin/kubernetes" -nt tests/kubernetes/device_plugin.go ]; then return; fi
    have go || { note "Kubernetes is built by go, which is not here"; return 1; }
    note "building Kubernetes $KUBERNETES_VERSION (ten minutes of two cores, once)"
    work=$(mktemp -d -p "$tools") && mkdir -p "$bin" &&
        cp tests/kubernetes/main.go tests/kubernetes/device_plugin.go "$work" &&
        compile_kubernetes "$work" "$bin/kubernetes" >"$tools/kubernetes.log" 2>&1 &&
        rm -rf "$work" ||
        { note "target/tools/kubernetes.log says why"; return 1; }
}

compile_kubernetes() (
    cd "$1" && source=$(module_source "k8s.io/kubernetes@v$KUBERNETES_VERSION") &&
        sed -e 's|^module .*|module cluster|' -e "s|=> ./staging/src/k8s.io/\(.*\)|=> k8s.io/\1 v$KUBELET_VERSION|" "$source/go.mod" >go.mod &&
        cp "$source/go.sum" . && chmod u+w go.sum && go mod edit "-require=k8s.io/kubernetes@v$KUBERNETES_VERSION" && go mod tidy -e &&
        CGO_ENABLED=0 go build -mod=mod -buildvcs=false -o "$2" -ldflags="-s -w \
            -X k8s.io/component-base/version.gitVersion=v$KUBERNETES_VERSION \
            -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${KUBERNETES_VERSION:2:2}" .
)

# What a node of the cluster needs beside it, and the program that marks steps in its pods.
node_of_cluster() {
    local name=kubernetes-$KUBERNETES_VERSION package
    for package in containerd runc containernetworking-plugins busybox-static; do
        if [ -e "$tools/$name/usr/share/doc/$package" ]; then continue; fi
        unpack_from_debian "$package" "$name" || return 1
    done
    if [ "$tools/$name/mark" -nt tests/kubernetes/mark/main.go ]; then return; fi
    CGO_ENABLED=0 go build -buildvcs=false -ldflags='-s -w' -o "$tools/$name/mark" tests/kubernetes/mark/main.go
}

# Built in a copy of the module, like Prometheus 3, and for the same reason. Some proxies do not offer this module; the
# story that needs it is then skipped.
linter_from_go() {
    local bin=$tools/dashboard-linter-$DASHBOARD_LINTER_VERSION work source
    if [ -x "$bin/dashboard-linter" ]; then return; fi
    have go || { note "the dashboards' linter is built by go, which is not here"; return 1; }
    source=$(module_source "github.com/grafana/dashboard-linter@$DASHBOARD_LINTER_VERSION" 2>/dev/null) ||
        { note "the Go module proxy does not offer the dashboards' linter"; return 1; }
    note "building the dashboards' linter $DASHBOARD_LINTER_VERSION (five minutes, once)"
    work=$(mktemp -d -p "$tools") &&
        cp -r "$source/." "$work" && chmod -R u+w "$work" &&
        (cd "$work" && GOWORK=off go build -buildvcs=false -ldflags='-s -w' -o "$bin/dashboard-linter" .) &&
        rm -rf "$work"
}

# The accessibility checker: one script, which the browser's test runs in the page.
axe_from_npm() {
    local folder=$tools/axe-core-$AXE_CORE_VERSION work
    if [ -f "$folder/axe.min.js" ]; then return; fi
    have npm || { note "axe-core comes from npm, which is not here"; return 1; }
    work=$(mktemp -d -p "$tools") &&
        (cd "$work" && npm pack --silent "axe-core@$AXE_CORE_VERSION" >/dev/null && tar xzf axe-core-*.tgz package/axe.min.js) &&
        mkdir -p "$folder" && mv "$work/package/axe.min.js" "$folder/" && rm -rf "$work"
}

# A virtual environment in target/tools/$1 with the packages that follow. Made under another name, so that one that was
# interrupted is not taken for a whole one; its scripts name its path, so they are not used, only `bin/python -m`.
environment_of_python() {
    local folder=$tools/$1
    shift
    if [ -x "$folder/bin/python" ]; then return; fi
    note "installing $* from PyPI"
    rm -rf "$folder.new" && python3 -m venv "$folder.new" &&
        "$folder.new/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2 &&
        mv "$folder.new" "$folder"
}

python_tools() {
    environment_of_python "python-tools-$MYPY_VERSION-$RUFF_VERSION-$SETUPTOOLS_VERSION" \
        "mypy==$MYPY_VERSION" "ruff==$RUFF_VERSION" "setuptools==$SETUPTOOLS_VERSION"
}

torch_from_pypi() {
    environment_of_python "torch-$TORCH_VERSION" "torch==$TORCH_VERSION" "torchvision==$TORCHVISION_VERSION" numpy \
        "lightning==$LIGHTNING_VERSION" "transformers==$TRANSFORMERS_VERSION" "accelerate==$ACCELERATE_VERSION" "jax==$JAX_VERSION"
}

# Installs the program $1 of crates.io in version $2.
from_crates() {
    local root=$tools/$1-$2
    if [ -x "$root/bin/$1" ]; then return; fi
    note "building $1 $2 (a few minutes, once)"
    # Its own profile may spend minutes on link-time optimisation that a tool does not need.
    CARGO_PROFILE_RELEASE_LTO=false CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
        cargo install --quiet --locked --root "$root" "$1@$2"
}

containers() { buildah --storage-driver vfs --root "$tools/containers/root" --runroot "$tools/containers/run" "$@"; }

# The image that a registry would serve as debian:$BASE_SUITE-slim, made from Debian's own packages.
base_image() {
    local image=localhost/highwater-test-base:$BASE_SUITE
    [ "$(id -u)" = 0 ] || { note "debootstrap needs root for the base image"; return 1; }
    if containers inspect --type image "$image" >/dev/null 2>&1; then
        # Interrupted runs leave images of 200 MB behind. If they cannot be removed, no test fails.
        containers rmi --prune >/dev/null || note "images that earlier tests left stay under target/tools/containers"
        return
    fi
    note "making the base image from Debian $BASE_SUITE (half a minute, once)"
    local tree container
    tree=$(mktemp -d -p "$tools") &&
        debootstrap --variant=minbase "$BASE_SUITE" "$tree" >"$tools/debootstrap.log" &&
        rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/* &&
        container=$(containers from scratch) &&
        containers add --quiet "$container" "$tree" / >/dev/null &&
        containers commit --quiet "$container" "$image" >/dev/null &&
        containers rm "$container" >/dev/null &&
        rm -rf "$tree"
}

# `set -e` has no effect inside a function followed by `||`, so each function above ends in the command that decides.
want() {
    local name=$1
    shift
    "$@" || missing+=("$name")
}

case ${1:-} in
peers)
    want prometheus prometheus_from_debian
    want alertmanager alertmanager_from_debian
    want "buildah, debootstrap, sqlite3 and chromium" debian_packages buildah debootstrap sqlite3 chromium
    want helm helm_from_go
    want otelcol otelcol_from_go
    want prometheus-3 prometheus_3_from_go
    want kubelet-podresources kubelet_from_go
    want axe-core axe_from_npm
    want "mypy, ruff and setuptools" python_tools
    want torch torch_from_pypi
    linter_from_go || note "the story with the dashboards' linter is skipped"
    want "the base image" base_image
    ;;
cluster)
    want "buildah and debootstrap" debian_packages buildah debootstrap
    want helm helm_from_go
    want kubernetes kubernetes_from_go
    want "containerd and runc" node_of_cluster
    want "the base image" base_image
    ;;
lint)
    want cargo-deny from_crates cargo-deny "$CARGO_DENY_VERSION"
    want "mypy, ruff and setuptools" python_tools
    ;;
fuzz)
    want cargo-fuzz from_crates cargo-fuzz "$CARGO_FUZZ_VERSION"
    ;;
mutants)
    want cargo-mutants from_crates cargo-mutants "$CARGO_MUTANTS_VERSION"
    ;;
*)
    echo "usage: $0 peers|cluster|lint|fuzz|mutants" >&2
    exit 2
    ;;
esac

if [ ${#missing[@]} -gt 0 ]; then
    for name in "${missing[@]}"; do note "MISSING: $name"; done
    [ -z "${CI:-}" ]
fi
