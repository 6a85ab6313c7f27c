# CPU:  docker build -t lean3d .
# CUDA: docker build -t lean3d --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# Run:  docker run --rm --gpus all --shm-size 8g -v /data:/data:ro -v "$PWD/runs:/app/runs" lean3d train_autoencoder --config configs/high_res.yaml data.source=/data/ct
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Triton compiles a small launcher for each kernel the first time it runs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements.txt ./
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -r requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps -e . \
    && useradd --create-home --uid 1000 lean3d \
    && mkdir -p /data runs \
    && chown lean3d:lean3d runs

USER lean3d
VOLUME ["/data", "/app/runs"]
ENTRYPOINT ["lean3d"]
CMD ["--help"]
