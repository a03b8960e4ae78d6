# The image of every node that prunes: docker build -t REGISTRY/gstep-prune -f jobs/cluster/prune.Dockerfile .
FROM python:3.11-slim-bookworm

# A C compiler for Triton, which builds the launchers of its kernels where they run; wget and procps for KubeRay and Ray.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev procps rsync wget \
    && rm -rf /var/lib/apt/lists/*

# In the layers' order of change: the 5 GB of torch and CUDA stay as they are when only this package changes.
COPY .ci/requirements-prune.lock /tmp/
RUN pip install --no-cache-dir --no-deps -r /tmp/requirements-prune.lock
COPY . /opt/gstep-cache
RUN pip install --no-cache-dir --no-deps --no-build-isolation /opt/gstep-cache \
    && useradd --create-home --uid 1000 ray \
    && install -d -o 1000 /models

# `utility` alone is the default of NVIDIA's container runtime; `video` is for --decoder nvdec.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,video \
    HF_HOME=/models \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_JOB_STOP_WAIT_TIME_S=30
USER 1000
WORKDIR /home/ray
CMD ["python", "-m", "jobs.prune", "--help"]
