# The server and its agent in one image. For CPU cores:        docker build -t lockstep .
# For NVIDIA GPUs, on NVIDIA's base image (NVRTC, cuDNN, NCCL): docker build --target gpu -t lockstep:gpu .
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked

# Newer than the build's Debian, so the program runs there.
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 AS gpu
# The driver's parts that the container gets; video is for JPEG files that the GPU decodes.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
# Authorities of public certificates: an agent's server, an object store, a provider that signs people in.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
# A volume that is mounted at a folder of the image gets its owner.
RUN useradd --create-home --uid 10001 lockstep \
    && install -d -o lockstep -g lockstep /data /agent
COPY --from=build /src/target/release/lockstep /usr/local/bin/lockstep
USER lockstep
VOLUME /data
EXPOSE 7070
ENTRYPOINT ["lockstep"]
CMD ["serve", "--data-dir", "/data"]

# Last: what `docker build` makes without --target.
FROM debian:bookworm-slim AS cpu
# Authorities of public certificates: an agent's server, an object store, a provider that signs people in.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
# A volume that is mounted at a folder of the image gets its owner.
RUN useradd --create-home --uid 10001 lockstep \
    && install -d -o lockstep -g lockstep /data /agent
COPY --from=build /src/target/release/lockstep /usr/local/bin/lockstep
USER lockstep
VOLUME /data
EXPOSE 7070
ENTRYPOINT ["lockstep"]
CMD ["serve", "--data-dir", "/data"]
