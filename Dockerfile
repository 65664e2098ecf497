# An image with CUDA and the package.
#
#     docker build -t hf-pipetransformer .
#     docker run --gpus all hf-pipetransformer      # the self-test on the first GPU
#     docker run --gpus all --ipc host -it hf-pipetransformer bash
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# torch, whose wheel brings its own CUDA libraries, in a layer that changes of the package leave as it is.
RUN pip install --no-cache-dir torch==2.13.0
WORKDIR /opt/hf-pipetransformer
COPY pyproject.toml README.md LICENSE ./
COPY hf_pipetransformer hf_pipetransformer
RUN pip install --no-cache-dir ".[demo]"

# The image is only built if the short self-test and one training step on two stages work, both without a GPU.
WORKDIR /workspace
COPY scripts/quick_start.py .
RUN hf-pipetransformer selftest --use_cpu && \
    sed 's/num_train_epochs=4/max_steps=1/' quick_start.py > one_step.py && \
    accelerate launch --multi_gpu --num_processes 2 one_step.py && \
    rm -r one_step.py outputs

CMD ["hf-pipetransformer", "selftest"]
