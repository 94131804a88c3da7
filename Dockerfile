# The spottrain command in a container: docker build -t spottrain .
# With what a job file needs besides: docker build --build-arg EXTRAS=train,aws -t spottrain .
FROM debian:bookworm-slim AS built
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv
COPY . /source
ARG EXTRAS=""
RUN python3 -m venv /opt/spottrain \
    && /opt/spottrain/bin/pip install --no-cache-dir "/source${EXTRAS:+[$EXTRAS]}"

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates git openssh-client python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home spottrain \
    && install --directory --owner spottrain /state /work
COPY --from=built /opt/spottrain /opt/spottrain
ENV PATH="/opt/spottrain/bin:$PATH" XDG_STATE_HOME=/state
USER spottrain
WORKDIR /work
VOLUME /state
ENTRYPOINT ["spottrain"]
