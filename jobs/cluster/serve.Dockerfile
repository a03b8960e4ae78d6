# The image that answers questions with vLLM: docker build -t REGISTRY/gstep-serve -f jobs/cluster/serve.Dockerfile .
FROM python:3.11-slim-bookworm

# Compilers for the kernels that Triton and vLLM build where they run.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc libc6-dev procps wget \
    && rm -rf /var/lib/apt/lists/*

COPY .ci/requirements-serve.lock /tmp/
RUN pip install --no-cache-dir --no-deps -r /tmp/requirements-serve.lock
COPY . /opt/gstep-cache
RUN pip install --no-cache-dir --no-deps --no-build-isolation /opt/gstep-cache \
    && useradd --create-home --uid 1000 ray \
    && install -d -o 1000 /models

ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HF_HOME=/models \
    RAY_USAGE_STATS_ENABLED=0
USER 1000
WORKDIR /home/ray
EXPOSE 8000
# SIGTERM reaches the server itself, which lets requests end. The key comes from VLLM_API_KEY: without it the server
# does not start, unless --no-key is an argument.
ENTRYPOINT ["python", "-m", "jobs.serve", "--host", "0.0.0.0"]
