# Tesserae on torch, from this repository:
#   docker build -t tesserae .                                         # for the CPU
#   docker build -t tesserae --build-arg TORCH=2.13.0 --build-arg TORCH_INDEX= .   # with CUDA
#   docker run --rm --shm-size 8g tesserae tesserae doctor --nproc 2
# PyPI's torch for Linux brings CUDA; the drivers come from the host (docker run --gpus all). Each RUN is a step of
# tools/container_steps.sh, which says what they do.
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY tools/container_steps.sh tools/setup.sh tools/phase.sh tools/cuda_headers.sh tools/
COPY requirements.txt requirements-dev.txt ./
COPY cmake/ cmake/
RUN tools/container_steps.sh environment
RUN tools/container_steps.sh packages
COPY CMakeLists.txt pyproject.toml README.md LICENSE ./
COPY tesserae/ tesserae/
COPY cli/ cli/
COPY python/ python/
RUN tools/container_steps.sh wheel

FROM python:${PYTHON} AS run
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY tools/container_steps.sh tools/
COPY requirements.txt ./
RUN tools/container_steps.sh environment
COPY --from=build /wheels/ /wheels/
RUN tools/container_steps.sh install
RUN tools/container_steps.sh check
ENV PATH=/opt/tesserae/bin:$PATH
WORKDIR /work
CMD ["tesserae", "doctor"]
