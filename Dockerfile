# This file builds three images: --target engine, operator or gateway.
#
#   docker build --target engine -t quire-engine .
#
# BASE_IMAGE   Python 3.11 to 3.13 with venv and ensurepip.
# TORCH_SPEC   Another torch for the engine (README, "A smaller torch"): a requirement or the address of a wheel.
# TRITON_SPEC  The Triton that belongs to TORCH_SPEC, such as that of torch's build for ROCm.
# COMPILER     Debian packages with which Triton compiles its launchers when a GPU uses a kernel for the first time. If
#              BASE_IMAGE is Debian, add python3-dev. For CPUs only, pass COMPILER= and save 200 MB.
#
# In each image, the dependencies (from a hash-locked file) are one layer, and quire's own code is a last, thin layer.
# RUN --mount needs BuildKit (docker build since 23.0), buildah or podman.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS base
# The numeric user lets Kubernetes verify that it is not root; libraries need its name. No process changes its user.
RUN echo 'quire:x:65532:65532:quire:/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'quire:x:65532:' >> /etc/group \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} +
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=quire
WORKDIR /

# Resolver and build backend are mounted during installation and are in no image. Index addresses are arguments of this
# stage only; otherwise they would be in the images' history. UV_CACHE_DIR is for builders that mount a cache elsewhere.
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

# The same tools. buildah mounts a cached stage as of its first line, so this stage has only one line.
FROM tools AS resolver

# The engine's lock in three layers: CUDA (2.7 GB), torch (1.8 GB) and the rest. A layer is rebuilt only if its part changes.
FROM base AS engine-locks
COPY requirements/engine.lock /
RUN mkdir /locks && touch /locks/cuda.lock /locks/torch.lock /locks/others.lock && awk '/^[a-z]/ { \
      part = /^(nvidia|cuda)-/ ? "cuda" : /^(torch|triton)==/ ? "torch" : "others" \
    } { print > "/locks/" part ".lock" }' /engine.lock

FROM base AS engine-dependencies
ARG TORCH_SPEC=
ARG TRITON_SPEC=
COPY --from=engine-locks /locks/cuda.lock /opt/quire/locks/
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/cuda.lock
COPY --from=engine-locks /locks/torch.lock /opt/quire/locks/
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/torch.lock
COPY --from=engine-locks /locks/others.lock /opt/quire/locks/
# Keep only the data of the AWS library for buckets and credentials: 3 MB of 30 MB.
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/others.lock \
    && find /opt/quire/lib/python3*/site-packages/botocore/data -mindepth 1 -maxdepth 1 -type d \
       ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -rf {} +

FROM base AS operator-dependencies
COPY requirements/operator.lock /opt/quire/locks/
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/operator.lock

FROM base AS gateway-dependencies
COPY requirements/gateway.lock /opt/quire/locks/
RUN --mount=type=bind,from=resolver,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/var/cache/uv \
    /opt/tools/install_in_image.sh /opt/quire/locks/gateway.lock

# Each distribution is built into a folder with the layout of /opt/quire, which is copied over the dependencies at the end.
FROM tools AS engine-code
COPY common common
COPY kernels kernels
COPY engine engine
RUN $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels common \
    && $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels kernels \
    && $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels engine \
    && $UV pip install -q --python $PYTHON --prefix /code --no-deps /wheels/*.whl

# The CPU kernels for each CPU level, compiled at their final path. They are recompiled only if kernels/ or the lock
# changes. No kernel runs here, so any x86-64 machine can compile for all levels.
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
# The parts of the driver that NVIDIA's container runtime mounts: CUDA's libraries and nvidia-smi.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG COMPILER="gcc libc6-dev"
RUN if [ -n "${COMPILER}" ]; then \
      apt-get update -q && apt-get install -qy --no-install-recommends ${COMPILER} && rm -rf /var/lib/apt/lists/*; \
    fi
COPY LICENSE /licenses/
# The paths of file://./models/… in pods, so that the manifests in examples/ work wherever the image runs.
COPY examples/models/quire-demo /models/models/quire-demo
COPY examples/models/quire-demo-tools /models/models/quire-demo-tools
COPY examples/models/adapters /models/models/adapters
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
