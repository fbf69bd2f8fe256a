# docker build -t sage-grpo .                          for NVIDIA GPUs
# docker build -t sage-grpo --build-arg DEVICE=cpu .   without one
#
# docker run --gpus all --ipc=host -v "$PWD:/data" -v "$HOME/.cache/huggingface:/cache" sage-grpo train --recipe wan/sage
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# cuda or cpu. torch's CUDA wheels carry the CUDA libraries; the driver comes from the host.
ARG DEVICE=cuda
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HOME=/cache

WORKDIR /source
# torch alone first: its layer stays when only the sources change.
COPY constraints.txt ./
RUN case "$DEVICE" in \
        cuda) pip install -c constraints.txt torch ;; \
        cpu) pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch ;; \
        *) echo "DEVICE must be cuda or cpu, got $DEVICE" >&2; exit 1 ;; \
    esac

COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN pip install -c constraints.txt '.[server]'

# Not root: what it writes to /data belongs to an ordinary user (choose another with `docker run --user`).
RUN useradd --create-home --uid 1000 trainer && mkdir -p /data /cache && chown trainer /data /cache
USER trainer
WORKDIR /data
ENTRYPOINT ["sage-grpo"]
CMD ["--help"]
