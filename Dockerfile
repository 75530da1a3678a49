# Three images from one file: --target engine, operator or gateway.
#
#   docker build --target engine -t quire-engine .
#
# BASE_IMAGE   Python 3.11 to 3.13 with venv and ensurepip.
# TORCH_SPEC   another torch for the engine (README, "A smaller torch"): a requirement, or the address of a wheel.
# COMPILER     Debian packages Triton compiles its launchers with, when a kernel is first used on a GPU. With a BASE_IMAGE
#              that is Debian itself add python3-dev; for CPU only pass COMPILER= and save 200 MB.
#
# In each image the dependencies, all from a lock with hashes, are one layer, and quire's own code is a last, thin one.
# RUN --mount is BuildKit's, as docker build has had it since 23.0; buildah and podman have it too.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS base
# A number, so that Kubernetes can tell it is not root; a name, because libraries ask for one. Nobody needs to become another.
RUN echo 'quire:x:65532:65532:quire:/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'quire:x:65532:' >> /etc/group \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} +
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=quire
WORKDIR /

# Resolver and build backend: mounted where dependencies are installed, in no image. So are the addresses of indexes, which
# as arguments of the images' own stages would be in their history. UV_CACHE_DIR is for builders that mount a cache elsewhere.
FROM base AS tools
ARG PIP_INDEX_URL
ARG UV_DEFAULT_INDEX
ARG UV_CACHE_DIR=/var/cache/uv
COPY requirements/bootstrap.lock requirements/install.sh requirements/install_in_image.sh /opt/tools/
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install -q --no-cache-dir --require-hashes -r /opt/tools/bootstrap.lock \
    && python3 -m venv --without-pip /opt/quire \
    && export -p | grep -E ' UV_(CACHE_DIR|DEFAULT_INDEX)=' > /opt/tools/environment
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_SYSTEM_CERTS=1 UV=/opt/tools/bin/uv PYTHON=/opt/quire/bin/python
WORKDIR /src

# The same; a stage that comes from its cache is mounted by buildah as its first line has it, so this one has no other.
FROM tools AS resolver

# The engine's lock in three: 2.7 GB of CUDA, 1.8 GB of torch, the rest. A layer is made anew, and moved, when its part changes.
FROM base AS engine-locks
COPY requirements/engine.lock /
RUN mkdir /locks && touch /locks/cuda.lock /locks/torch.lock /locks/others.lock && awk '/^[a-z]/ { \
      part = /^(nvidia|cuda)-/ ? "cuda" : /^(torch|triton)==/ ? "torch" : "others" \
    } { print > "/locks/" part ".lock" }' /engine.lock

FROM base AS engine-dependencies
ARG TORCH_SPEC=
COPY --from=engine-locks /locks/cuda.lock /opt/quire/locks/
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/cuda.lock
COPY --from=engine-locks /locks/torch.lock /opt/quire/locks/
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/torch.lock
COPY --from=engine-locks /locks/others.lock /opt/quire/locks/
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/others.lock

FROM base AS operator-dependencies
COPY requirements/operator.lock /opt/quire/locks/
# Of the AWS library's data only what is needed to read a bucket and to get credentials: 3 MB of 30.
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/operator.lock \
    && find /opt/quire/lib/python3*/site-packages/botocore/data -mindepth 1 -maxdepth 1 -type d \
       ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -rf {} +

FROM base AS gateway-dependencies
COPY requirements/gateway.lock /opt/quire/locks/
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/gateway.lock

# Each lands in a folder of its own, laid out like /opt/quire, and is laid over the dependencies in the end.
FROM tools AS engine-code
COPY common common
COPY kernels kernels
COPY engine engine
RUN $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels common \
    && $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels kernels \
    && $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels engine \
    && $UV pip install -q --python $PYTHON --prefix /code --no-deps /wheels/*.whl

# The CPU kernels for each level of CPUs (docs/adr/0055), compiled where they will lie: anew only when kernels/ or the lock has
# changed. No kernel is run: any x86-64 machine compiles for all.
FROM engine-dependencies AS engine-kernels
COPY kernels/src/quire_kernels /src/quire_kernels
RUN mv /src/quire_kernels "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && python -m quire_kernels.precompile --out /precompiled-kernels

FROM tools AS operator-code
COPY common common
COPY operator operator
RUN $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels common \
    && $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels operator \
    && $UV pip install -q --python $PYTHON --prefix /code --no-deps /wheels/*.whl

FROM tools AS gateway-code
COPY common common
COPY gateway gateway
RUN $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels common \
    && $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels gateway \
    && $UV pip install -q --python $PYTHON --prefix /code --no-deps /wheels/*.whl

FROM engine-dependencies AS engine
# What NVIDIA's container runtime mounts of the driver: what CUDA needs, and nvidia-smi.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG COMPILER="gcc libc6-dev"
RUN if [ -n "${COMPILER}" ]; then \
      apt-get update -q && apt-get install -qy --no-install-recommends ${COMPILER} && rm -rf /var/lib/apt/lists/*; \
    fi
COPY LICENSE /licenses/
# Where a pod looks for examples/demo.yaml's file://./models/quire-demo: the example runs wherever the image does.
COPY examples/models/quire-demo /models/models/quire-demo
ENV QUIRE_PRECOMPILED_KERNELS=/opt/quire/share/precompiled-kernels
COPY --from=engine-kernels /precompiled-kernels /opt/quire/share/precompiled-kernels
COPY --from=engine-code /code /opt/quire
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["quire-engine"]
LABEL org.opencontainers.image.title="quire-engine" org.opencontainers.image.licenses="Apache-2.0"

FROM operator-dependencies AS operator
COPY LICENSE /licenses/
COPY --from=operator-code /code /opt/quire
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["quire-operator"]
LABEL org.opencontainers.image.title="quire-operator" org.opencontainers.image.licenses="Apache-2.0"

FROM gateway-dependencies AS gateway
COPY LICENSE /licenses/
COPY --from=gateway-code /code /opt/quire
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["quire-gateway"]
LABEL org.opencontainers.image.title="quire-gateway" org.opencontainers.image.licenses="Apache-2.0"
