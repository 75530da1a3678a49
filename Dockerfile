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
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS base
# Numeric, so that Kubernetes can tell it is not root; a name, because libraries ask for one.
RUN echo 'quire:x:65532:65532:quire:/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'quire:x:65532:' >> /etc/group
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=quire
WORKDIR /

# Resolver and build backend: in no image.
FROM base AS tools
ARG PIP_INDEX_URL
ARG UV_DEFAULT_INDEX
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 UV_SYSTEM_CERTS=1 UV=/opt/tools/bin/uv PYTHON=/opt/quire/bin/python
COPY requirements/bootstrap.lock requirements/install.sh /src/requirements/
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install -q --no-cache-dir --require-hashes -r /src/requirements/bootstrap.lock \
    && python3 -m venv --without-pip /opt/quire
WORKDIR /src

FROM tools AS engine-dependencies
ARG TORCH_SPEC=
COPY requirements/engine.lock requirements/
RUN TORCH_SPEC="${TORCH_SPEC}" requirements/install.sh requirements/engine.lock

FROM tools AS operator-dependencies
COPY requirements/operator.lock requirements/
# Of the AWS library's data only what is needed to read a bucket and to get credentials: 3 MB of 30.
RUN requirements/install.sh requirements/operator.lock \
    && find /opt/quire/lib/python3*/site-packages/botocore/data -mindepth 1 -maxdepth 1 -type d \
       ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -rf {} +

FROM tools AS gateway-dependencies
COPY requirements/gateway.lock requirements/
RUN requirements/install.sh requirements/gateway.lock

# Each lands in a folder of its own, laid out like /opt/quire, and is laid over the dependencies in the end.
FROM tools AS engine-code
COPY kernels kernels
COPY engine engine
RUN $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels kernels \
    && $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels engine \
    && $UV pip install -q --python $PYTHON --prefix /code --no-deps /wheels/*.whl

FROM tools AS operator-code
COPY operator operator
RUN $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels operator \
    && $UV pip install -q --python $PYTHON --prefix /code --no-deps /wheels/*.whl

FROM tools AS gateway-code
COPY gateway gateway
RUN $UV build -q --wheel --no-build-isolation --python /opt/tools/bin/python -o /wheels gateway \
    && $UV pip install -q --python $PYTHON --prefix /code --no-deps /wheels/*.whl

FROM base AS engine
# What NVIDIA's container runtime mounts of the driver: what CUDA needs, and nvidia-smi.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG COMPILER="gcc libc6-dev"
RUN if [ -n "${COMPILER}" ]; then \
      apt-get update -q && apt-get install -qy --no-install-recommends ${COMPILER} && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=engine-dependencies /opt/quire /opt/quire
COPY --from=engine-code /code /opt/quire
# Where a pod looks for examples/demo.yaml's file://./models/quire-demo: the example runs wherever the image does.
COPY examples/models/quire-demo /models/models/quire-demo
COPY LICENSE /licenses/
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["quire-engine"]
LABEL org.opencontainers.image.title="quire-engine" org.opencontainers.image.licenses="Apache-2.0"

FROM base AS operator
COPY --from=operator-dependencies /opt/quire /opt/quire
COPY --from=operator-code /code /opt/quire
COPY LICENSE /licenses/
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["quire-operator"]
LABEL org.opencontainers.image.title="quire-operator" org.opencontainers.image.licenses="Apache-2.0"

FROM base AS gateway
COPY --from=gateway-dependencies /opt/quire /opt/quire
COPY --from=gateway-code /code /opt/quire
COPY LICENSE /licenses/
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["quire-gateway"]
LABEL org.opencontainers.image.title="quire-gateway" org.opencontainers.image.licenses="Apache-2.0"
