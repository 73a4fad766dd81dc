# syntax=docker/dockerfile:1
# The service with its bundled models; deploy/README.md tells how to build and run it.

ARG RUNTIME=cpu
# Empty: the newest versions that pyproject.toml allows, unchecked, as from an index with packages of its own.
ARG LOCKED=yes
# An index with builds of PyTorch that lack CUDA, which are then taken in the locked versions, unchecked; empty: those of the lock.
ARG TORCH_INDEX=
# By a digest, for images that can be built again: deploy/README.md tells how to find it.
ARG BASE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS base
ENV PATH=/opt/acclimate/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# Gigabytes that change with what is required alone: versions and hashes of `make lock`. Without a lock, the distribution, which
# is empty without its sources, is installed for what it depends on (DL3013 takes it for a package without a version).
FROM base AS dependencies
ARG RUNTIME
ARG LOCKED
ARG TORCH_INDEX
WORKDIR /build
RUN python -m venv /opt/acclimate/venv
COPY pyproject.toml deploy/requirements-cpu.txt deploy/requirements-gpu.txt deploy/without-cuda.sh ./
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    if [ -n "${TORCH_INDEX}" ]; then ./without-cuda.sh "requirements-${RUNTIME}.txt" \
        && python -m pip install --no-deps --index-url "${TORCH_INDEX}" --requirement torch.txt \
        && python -m pip install --no-deps --require-hashes --requirement others.txt && python -m pip check; \
    elif [ -n "${LOCKED}" ]; then python -m pip install --require-hashes --requirement "requirements-${RUNTIME}.txt"; \
    else touch README.md LICENSE NOTICE && python -m pip install ".[serve,otel,${RUNTIME}]"; fi

FROM base AS wheel
WORKDIR /build
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY service service
COPY adapters adapters
COPY model_store/acclimate_store model_store/acclimate_store
COPY learning/acclimate_learning learning/acclimate_learning
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python -m pip wheel --no-deps --wheel-dir dist .

FROM base AS runtime-cpu
LABEL org.opencontainers.image.title="Acclimate" \
      org.opencontainers.image.description="Serves one frozen image classifier to many clients and adapts it to each" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"

# redis-server keeps the states of a container that is given no ACCLIMATE_REDIS_URL.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends "redis-server=5:7.0.*" \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 acclimate \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /var/lib/acclimate acclimate \
    && install --directory --owner=acclimate --group=acclimate --mode=700 /var/lib/acclimate

COPY --from=dependencies /opt/acclimate/venv /opt/acclimate/venv
RUN --mount=type=bind,from=wheel,source=/build/dist,target=/build/dist \
    python -m pip install --no-cache-dir --no-deps --no-index --force-reinstall /build/dist/*.whl
COPY model_store/bundles /opt/acclimate/models
COPY deploy/healthcheck.py /opt/acclimate/healthcheck.py

ENV ACCLIMATE_HOST=0.0.0.0 \
    ACCLIMATE_PORT=8000 \
    ACCLIMATE_MODEL_STORE=/opt/acclimate/models \
    ACCLIMATE_DATA_DIR=/var/lib/acclimate
USER 10001:10001
WORKDIR /var/lib/acclimate
VOLUME /var/lib/acclimate
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --start-interval=1s --retries=3 \
    CMD ["python", "/opt/acclimate/healthcheck.py"]
ENTRYPOINT ["acclimate"]
CMD ["serve"]

FROM runtime-cpu AS runtime-gpu
ENV ACCLIMATE_DEVICE=cuda

# hadolint ignore=DL3006
FROM runtime-${RUNTIME}
