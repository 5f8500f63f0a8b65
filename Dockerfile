# The server and its agent in one image: docker build -t lockstep .
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked

FROM debian:bookworm-slim
RUN useradd --create-home --uid 10001 lockstep \
    && install -d -o lockstep -g lockstep /data
COPY --from=build /src/target/release/lockstep /usr/local/bin/lockstep
USER lockstep
VOLUME /data
EXPOSE 7070
ENTRYPOINT ["lockstep"]
CMD ["serve", "--data-dir", "/data"]
