# The daemon in a container: `docker build -t highwater .`, or `buildah bud -t highwater .`
#
# The base images are arguments, so that a site can build from its own mirror:
#   docker build --build-arg BUILDER=mirror.example/rust:1.95.0-bookworm --build-arg RUNTIME=mirror.example/debian:12 .
# BUILDER needs Rust, a C compiler and ca-certificates. RUNTIME needs only a glibc no older than BUILDER's: no shell, no
# CUDA. The certificate authorities for OTLP over https:// come from BUILDER; a site adds its own with
# OTEL_EXPORTER_OTLP_CERTIFICATE. NVML (libnvidia-ml.so.1) is not in the image: the NVIDIA container runtime mounts the
# host's at startup.
#
# With a binary already built for RUNTIME's glibc, nothing is compiled. The authorities are then RUNTIME's, if any:
#   cargo build --release && docker build --target prebuilt -t highwater .
#
# Try it without a GPU, then with all of them:
#   docker run --rm -p 127.0.0.1:10450:10450 highwater demo --listen 0.0.0.0:10450
#   docker run --rm -p 127.0.0.1:10450:10450 --gpus all -v /run/highwater:/run/highwater highwater \
#     serve --listen 0.0.0.0:10450 --annotations-socket /run/highwater/annotations.sock
# Jobs mark their steps through the socket, whose directory must be writable by user 65534. Annotations over HTTP need
# `annotations.token_file`, because the container listens on more than loopback.
#
# Both bases are pinned by digest (of the multi-platform index). To renew one, name the digest that
# `docker buildx imagetools inspect debian:bookworm-slim` prints; Renovate and Dependabot do so too.
ARG BUILDER=rust:1.95.0-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1
ARG RUNTIME=debian:bookworm-slim@sha256:7b140f374b289a7c2befc338f42ebe6441b7ea838a042bbd5acbfca6ec875818

FROM ${BUILDER} AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/src/target --mount=type=cache,target=/usr/local/cargo/registry \
    cargo build --release --locked --bin highwater && install -D -m 0755 target/release/highwater /out/highwater && \
    install -D -m 0644 /etc/ssl/certs/ca-certificates.crt /out/ca-certificates.crt

# Everything except the binary, shared by the two images below.
FROM ${RUNTIME} AS runtime
# `make image` sets both.
ARG VERSION=
ARG REVISION=
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.title="highwater" \
      org.opencontainers.image.description="What GPU memory did inside each step of training: a node daemon for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
# The NVIDIA container runtime gives the container every GPU, and of the driver's libraries only NVML.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
# The user owns no directories; by default the daemon creates the annotations socket and the captures
# (docs/recordings.md) below these. Mount a volume at /tmp/highwater to keep captures.
ENV XDG_RUNTIME_DIR=/tmp \
    XDG_STATE_HOME=/tmp
USER 65534:65534
# HTTP; in the chart also the kubelet's probes, and annotations with a token.
EXPOSE 10450 10451 10452
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/highwater"]
CMD ["serve"]

FROM runtime AS prebuilt
ARG BINARY=target/release/highwater
COPY --chmod=0755 ${BINARY} /usr/local/bin/highwater

FROM runtime AS image
COPY --from=build /out/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/highwater /usr/local/bin/highwater
