# The server and its agent in one image. For CPU cores:        docker build -t lockstep .
# For NVIDIA GPUs, on NVIDIA's base image (NVRTC, cuDNN, NCCL): docker build --target gpu -t lockstep:gpu .
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked

# Ubuntu 24.04 has a newer glibc than the build's Debian, so the program runs in this image.
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 AS gpu
# Parts of the driver that the container gets; `video` lets the GPU decode JPEG files.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
# Public CA certificates, for connections to a server, an object store or an OpenID provider.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
# A new volume gets the owner of the folder at which it is mounted.
RUN useradd --create-home --uid 10001 lockstep \
    && install -d -o lockstep -g lockstep /data /agent
COPY --from=build /src/target/release/lockstep /usr/local/bin/lockstep
USER lockstep
VOLUME /data
EXPOSE 7070
ENTRYPOINT ["lockstep"]
CMD ["serve", "--data-dir", "/data"]

# The last stage is the default of `docker build`.
FROM debian:bookworm-slim AS cpu
# Public CA certificates, for connections to a server, an object store or an OpenID provider.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
# A new volume gets the owner of the folder at which it is mounted.
RUN useradd --create-home --uid 10001 lockstep \
    && install -d -o lockstep -g lockstep /data /agent
COPY --from=build /src/target/release/lockstep /usr/local/bin/lockstep
USER lockstep
VOLUME /data
EXPOSE 7070
ENTRYPOINT ["lockstep"]
CMD ["serve", "--data-dir", "/data"]
