# The daemon in a container: `docker build -t highwater .`, or `buildah bud -t highwater .`
#
# Base images are arguments, so that a site can build from its own mirror:
#   docker build --build-arg BUILDER=mirror.example/rust:1.95.0-bookworm --build-arg RUNTIME=mirror.example/debian:12 .
# BUILDER needs Rust, a C compiler and ca-certificates; RUNTIME needs glibc no older than BUILDER's, and nothing else: no
# shell, no CUDA. Whom OTLP over https:// trusts comes from BUILDER; a site adds its own with OTEL_EXPORTER_OTLP_CERTIFICATE.
# NVML (libnvidia-ml.so.1) is not in the image. The NVIDIA container runtime mounts the host's at start.
#
# With a binary that is already built for RUNTIME's glibc, nothing is compiled; authorities are RUNTIME's then, if it has any:
#   cargo build --release && docker build --target prebuilt -t highwater .
#
# Try it without a GPU, then with all of them:
#   docker run --rm -p 127.0.0.1:10450:10450 highwater demo --listen 0.0.0.0:10450
#   docker run --rm -p 127.0.0.1:10450:10450 --gpus all -v /run/highwater:/run/highwater highwater \
#     serve --listen 0.0.0.0:10450 --annotations-socket /run/highwater/annotations.sock
# Jobs mark their steps through the socket, whose directory must be writable by user 65534; over HTTP they need
# `annotations.token_file`, because the container listens beyond loopback.
ARG BUILDER=rust:1.95.0-bookworm
ARG RUNTIME=debian:bookworm-slim

FROM ${BUILDER} AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/src/target --mount=type=cache,target=/usr/local/cargo/registry \
    cargo build --release --locked --bin highwater && install -D -m 0755 target/release/highwater /out/highwater && \
    install -D -m 0644 /etc/ssl/certs/ca-certificates.crt /out/ca-certificates.crt

# Everything but the binary, shared by the two images below.
FROM ${RUNTIME} AS runtime
LABEL org.opencontainers.image.title="highwater" \
      org.opencontainers.image.description="What GPU memory did inside each step of training: a node daemon for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
# What the NVIDIA container runtime gives the container: every GPU, and of the driver's libraries only NVML.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
# The user has no directories of its own; the annotations socket and the captures of docs/recordings.md are made below
# these unless told otherwise. Mount a volume at /tmp/highwater to keep captures.
ENV XDG_RUNTIME_DIR=/tmp \
    XDG_STATE_HOME=/tmp
USER 65534:65534
EXPOSE 10450
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/highwater"]
CMD ["serve"]

FROM runtime AS prebuilt
ARG BINARY=target/release/highwater
COPY --chmod=0755 ${BINARY} /usr/local/bin/highwater

FROM runtime AS image
COPY --from=build /out/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/highwater /usr/local/bin/highwater
